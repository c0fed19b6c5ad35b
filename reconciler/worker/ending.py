"""Ending: what becomes of a job when its handler has stopped.

A decision first (a value), then one fenced statement. The database may be away just then: the statement is
tried until it answers, because losing a finished job's "done" would mean doing the work again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from reconciler.worker.claim import Claim
from reconciler.worker.context import JobContext
from reconciler.worker.errors import JobTimeoutError, LeaseLostError, WorkerStoppingError
from reconciler.worker.finish import Ended, end_lease, finish_job, release_job, retry_job
from reconciler.worker.logs import redact
from reconciler.worker.retry import RetryDecision
from reconciler.worker.sdk import Sdk
from reconciler.worker.session import Connection

REASON_CHARS = 500
_log = logging.getLogger(__name__)
Classify = Callable[[BaseException], RetryDecision]


class Action(StrEnum):
    """The way a run ends."""

    DONE = "done"
    FAIL = "fail"
    RETRY = "retry"
    RELEASE = "release"
    END_LEASE = "end_lease"


@dataclass(frozen=True, slots=True)
class Ending:
    """How, and why."""

    action: Action
    code: str | None = None
    reason: str | None = None

    def fits(self, found: Ended | None) -> bool:
        """Is what the row says this ending, and not the reaper's verdict on the same run?"""
        if found is None:
            return False
        if self.action is Action.DONE:
            return found.status == "done"
        if self.action is Action.FAIL:
            return found.status == "failed" and found.fail_code == self.code
        if self.action is Action.RETRY:
            return found.status in ("queued", "failed") and found.fail_code == self.code
        # A release is due at once; the reaper's requeue always waits.
        return self.action is Action.RELEASE and found.status == "queued" and not found.delayed


def decide_ending(
    job: JobContext,
    error: BaseException | None,
    *,
    classify: Classify,
    release_on_stop: bool,
    scratch_root: str,
) -> Ending:
    """Judge a run that has stopped.

    A run that was told to stop is never "done", even when its handler returned without an error: it may
    have returned early because it was told. Running it again is the safe mistake.
    """
    told = job.reason
    if told is None and error is None:
        return Ending(Action.DONE)
    if isinstance(told, WorkerStoppingError):
        return Ending(Action.RELEASE if release_on_stop else Action.END_LEASE, told.code, told.message)
    # Under the fence this changes a row only if it is ours after all; then nobody need wait for the lease.
    if isinstance(told, LeaseLostError) or (told is None and isinstance(error, LeaseLostError)):
        return Ending(Action.END_LEASE, LeaseLostError.code, str(told or error))
    cause = told if told is not None else error
    assert cause is not None
    decision = (
        RetryDecision(False, cause.code) if isinstance(cause, JobTimeoutError) else _judge(cause, classify)
    )
    code = str(decision.code)  # a rule of the app may answer with a number
    reason = redact(f"{type(cause).__name__}: {_message(cause)}", scratch_root)[:REASON_CHARS]
    return Ending(Action.RETRY if decision.retryable else Action.FAIL, code, reason)


def _judge(error: BaseException, classify: Classify) -> RetryDecision:
    """A classifier is the app's code: when it breaks, the job still needs an end."""
    try:
        return classify(error)
    except Exception:  # noqa: BLE001 - see above; logged
        _log.exception("the classifier broke: the error counts as fatal")
        return RetryDecision(False, "CLASSIFIER_FAILED")


def _message(error: BaseException) -> str:
    """An error's text, also when its __str__ breaks."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - see above; logged
        _log.exception("an error could not be printed")
        return "(no message)"


def write_ending(conn: Connection, claim: Claim, ending: Ending, sdk: Sdk) -> str:
    """Carry it out, and say in a word what became of the job."""
    if ending.action is Action.DONE:
        finish_job(conn, claim, success=True, sdk=sdk)
        return "done"
    if ending.action is Action.FAIL:
        finish_job(conn, claim, success=False, code=ending.code, reason=ending.reason, sdk=sdk)
        return "failed"
    if ending.action is Action.RETRY:
        retried = retry_job(conn, claim, code=ending.code or "UNKNOWN", reason=ending.reason, sdk=sdk)
        return "requeued" if retried.requeued else "failed: attempts used up"
    if ending.action is Action.RELEASE:
        release_job(conn, claim, sdk=sdk)
        return "released"
    end_lease(conn, claim, sdk=sdk)
    return "lease ended"
