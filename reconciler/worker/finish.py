"""Finish: the four ways a run ends. Done, failed, once more, given back; and the lease ended early."""

from __future__ import annotations

from dataclasses import dataclass

from reconciler.worker import metrics
from reconciler.worker.claim import Claim
from reconciler.worker.errors import ArgumentError
from reconciler.worker.sdk import Sdk, current
from reconciler.worker.statements import Query, Steps, compose, primitive


@dataclass(frozen=True, slots=True)
class Retried:
    """What became of a job that asked to be run again: queued after `delay_sec`, or failed for good."""

    requeued: bool
    delay_sec: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """What a row says of a run that has ended: done, failed or queued (whatever the app's words are)."""

    status: str | None
    fail_code: str | None
    delayed: bool


@primitive
def finish_job(
    claim: Claim,
    *,
    success: bool,
    code: str | None = None,
    reason: str | None = None,
    sdk: Sdk | None = None,
) -> Steps[None]:
    """End this run as done or as failed, and clear its lock fields.

    `success=False` always fails the job; `retry_job` is for what may go better next time.
    """
    context = current(sdk)
    if not isinstance(success, bool):
        raise ArgumentError("success", success, "True or False", "retry_job asks for another run")
    if success and (code is not None or reason is not None):
        raise ArgumentError(
            "code", code or reason, "only for success=False", "a job that is done has no failure"
        )
    params = {**claim.fence_params(), "code": _text("code", code), "reason": _text("reason", reason)}
    ending = "done_word" if success else "failed_word"
    rows = yield Query(claim.table, compose(context.spec(claim.table), "finish", ending=ending), params)
    if not rows:
        raise claim.lost()


@primitive
def retry_job(
    claim: Claim, *, code: str, reason: str | None = None, sdk: Sdk | None = None
) -> Steps[Retried]:
    """Queue this job again after a growing delay, or fail it when its attempts are used up."""
    context = current(sdk)
    if not isinstance(code, str) or not code:
        raise ArgumentError("code", code, "a non-empty word such as UPSTREAM_FAILURE", "it becomes fail_code")
    params = {
        **context.retry_params,
        **claim.fence_params(),
        "max_attempts": context.policy.max_attempts,
        "code": _text("code", code),
        "reason": _text("reason", reason),
    }
    rows = yield Query(claim.table, compose(context.spec(claim.table), "retry"), params)
    if not rows:
        raise claim.lost()
    exhausted, delay_sec = rows[0]
    metrics.RETRY_ATTEMPTS.add(1, code=code)
    return Retried(requeued=not exhausted, delay_sec=None if exhausted else delay_sec)


@primitive
def release_job(claim: Claim, *, sdk: Sdk | None = None) -> Steps[None]:
    """Give this job back at once, its attempt refunded: for a worker that must leave, not for errors."""
    context = current(sdk)
    rows = yield Query(claim.table, compose(context.spec(claim.table), "release"), claim.fence_params())
    if not rows:
        raise claim.lost()


@primitive
def end_lease(claim: Claim, *, sdk: Sdk | None = None) -> Steps[None]:
    """Let the lease end now, without a status change: this run is over and the next pass may take the job."""
    context = current(sdk)
    rows = yield Query(claim.table, compose(context.spec(claim.table), "end_lease"), claim.fence_params())
    if not rows:
        raise claim.lost()


@primitive
def ended_as(claim: Claim, *, sdk: Sdk | None = None) -> Steps[Ended | None]:
    """How the row says this very run ended, if it ended: for an ending whose answer was lost on the wire."""
    context = current(sdk)
    params = {"id": str(claim.id), "attempt": claim.attempt}
    rows = yield Query(claim.table, compose(context.spec(claim.table), "ended_as"), params)
    return Ended(*rows[0]) if rows else None


def _text(key: str, value: object) -> str | None:
    """Postgres text cannot hold NUL or half a surrogate pair; a handler's error message can."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ArgumentError(key, value, "text or None")
    return value.replace("\x00", "�").encode("utf-8", "replace").decode("utf-8")
