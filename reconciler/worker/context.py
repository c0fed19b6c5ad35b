"""Job context: which job this code runs for, how much time it has left, and whether it should stop.

Carried by contextvars, so that a function deep below a handler can ask without being told: through awaits,
and into the thread of a plain `def` handler. Outside a worker, `run_with_job_context` sets one up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import isawaitable
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from reconciler.worker.claim import Claim
from reconciler.worker.errors import JobTimeoutError
from reconciler.worker.identity import short_id

if TYPE_CHECKING:
    from reconciler.worker.budget import Budget
    from reconciler.worker.output import Scratch

T = TypeVar("T")

LLM_CALL_CAP_SEC = 180.0
MAX_TIMEOUT_SEC = 20 * 60.0
DEFAULT_TIMEOUT_SEC = 4 * 60.0
AGENT_TIMEOUTS_SEC: Mapping[str, float] = MappingProxyType(
    {
        "spelling-grammar": 6 * 60.0,
        "simple-link-verifier": 8 * 60.0,
        "fallacy-check": 10 * 60.0,
        "multi-fallacy-eval": 15 * 60.0,
    }
)
"""The document's list. Every timeout is capped at 20 minutes."""


def timeout_for(name: str, timeouts: Mapping[str, float] = AGENT_TIMEOUTS_SEC) -> float:
    """The time budget of an agent or a stage, in seconds."""
    return min(timeouts.get(name, DEFAULT_TIMEOUT_SEC), MAX_TIMEOUT_SEC)


class Services(Protocol):
    """What a running worker does for its jobs' contexts."""

    def set_stage(self, job: JobContext, stage: str, **options: Any) -> None: ...

    def emit(
        self, job: JobContext, kind: str, details: Mapping[str, Any] | None, *, patient: bool = True
    ) -> None: ...

    def row(self, job: JobContext) -> dict[str, Any]: ...

    def assert_held(self, job: JobContext) -> None: ...

    def scratch_root(self) -> Path: ...


@dataclass(eq=False)
class JobContext:
    """One run of one job, as its handler sees it.

    `deadline` is on the monotonic clock: the nearer of `limit_at`, which the code set, and `budget_at`, the
    hard budget of max_runtime, which follows the stage. `cancelled` is set when the run must stop: the lease
    is lost, the budget is used up, or the worker leaves; `check()` then raises the reason.
    """

    job_id: Any
    worker_id: str = field(default_factory=short_id)
    limit_at: float | None = None
    budget_at: float | None = None
    budget: Budget | None = None
    claim: Claim | None = None
    services: Services | None = None
    cancelled: Event = field(default_factory=Event)
    reason: BaseException | None = None
    last_percent: float | None = None
    threads: list[Event] = field(default_factory=list)
    """The ends of what `to_thread` started for this run."""

    @property
    def deadline(self) -> float | None:
        return min((at for at in (self.limit_at, self.budget_at) if at is not None), default=None)

    @property
    def table(self) -> str | None:
        return None if self.claim is None else self.claim.table

    @property
    def stage(self) -> str | None:
        return None if self.claim is None else self.claim.stage

    @property
    def attempt(self) -> int | None:
        return None if self.claim is None else self.claim.attempt

    def cancel(self, reason: BaseException) -> None:
        """Ask the handler to stop. The first reason stays."""
        if not self.cancelled.is_set():
            self.reason = reason
            self.cancelled.set()

    def check(self) -> None:
        """Raise when this run must stop: call it between two steps of the work."""
        if self.reason is not None:
            raise self.reason
        deadline = self.deadline
        if deadline is not None and time.monotonic() >= deadline:
            raise JobTimeoutError

    def remaining(self, cap: float | None = LLM_CALL_CAP_SEC) -> float:
        """Seconds that one call may take: what is left of the budget, at most `cap`. Never negative."""
        deadline = self.deadline
        left = float("inf") if deadline is None else deadline - time.monotonic()
        return max(0.0, left if cap is None else min(left, cap))

    def limit(self, seconds: float) -> None:
        """Shorten the budget to `seconds` from now; it never grows."""
        until = time.monotonic() + seconds
        self.limit_at = until if self.limit_at is None else min(self.limit_at, until)

    # ── what the worker does for a job ──────────────────────────────────────────────────────────────

    def set_stage(self, stage: str, **options: Any) -> None:
        """Enter a stage: the row says so, and the lease follows that stage's SLA."""
        self.check()  # a run that was told to stop must not extend its own lease
        self._services().set_stage(self, stage, **options)

    def emit(self, kind: str, details: Mapping[str, Any] | None = None, *, patient: bool = True) -> None:
        """Write an event of this run, under the fence. `patient` waits for a database that is away."""
        self.check()
        self._services().emit(self, kind, details, patient=patient)

    def row(self) -> dict[str, Any]:
        """The job's row as a dict: the app's own columns."""
        self.check()
        return self._services().row(self)

    def assert_held(self) -> None:
        """Ask the database whether this run still owns its job; LeaseLostError if not. Publish only after."""
        self.check()
        self._services().assert_held(self)

    def scratch(self) -> Scratch:
        """A directory for this job and this attempt alone."""
        from reconciler.worker.output import Scratch  # noqa: PLC0415 - most jobs write no files

        assert self.claim is not None
        return Scratch.of(
            self._services().scratch_root(), self.claim.id, self.claim.attempt, self.claim.table
        )

    def _services(self) -> Services:
        if self.services is None:
            raise LookupError("this job context belongs to no worker: only Worker.run() gives it a database")
        return self.services


_current: ContextVar[JobContext | None] = ContextVar("job_reaper_job", default=None)


def current_job() -> JobContext | None:
    """The job this code runs for, or None."""
    return _current.get()


@contextlib.contextmanager
def job_context(job: JobContext) -> Iterator[JobContext]:
    """Run a block for this job."""
    token = _current.set(job)
    try:
        yield job
    finally:
        _current.reset(token)


def run_with_job_context(work: Callable[[], T], *, job_id: Any, timeout_ms: float | None = None) -> T:
    """Run `work` for a job with a time budget. For a coroutine function, await what this gives back.

    For code whose jobs come from elsewhere (pg-boss): no lease is involved.
    """
    seconds = None if timeout_ms is None else min(timeout_ms / 1000, MAX_TIMEOUT_SEC)
    job = JobContext(job_id, limit_at=None if seconds is None else time.monotonic() + seconds)
    with job_context(job):
        result = work()
    # A coroutine has not run a line yet: its context must be there when it does.
    return cast(T, _awaited(result, job)) if isawaitable(result) else result


async def _awaited(result: Awaitable[T], job: JobContext) -> T:
    with job_context(job):
        return await result


def check_job_timeout() -> None:
    """Raise JobTimeoutError when the current job's budget is used up, or why else it must stop."""
    job = _current.get()
    if job is not None:
        job.check()


def remaining(cap: float | None = LLM_CALL_CAP_SEC) -> float:
    """Seconds one call may take now; `cap` outside any job."""
    job = _current.get()
    if job is not None:
        return job.remaining(cap)
    return float("inf") if cap is None else cap
