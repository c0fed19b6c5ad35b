"""Stages: `with with_stage("clip"):` around a phase of the work, or `@with_stage("clip")` on it.

Entering sets the row's stage and a lease by that stage's SLA; leaving checks that the run may go on. The
document's phases are resolve, clip, upload, asr and finalize; any other word works too. Errors pass through
unchanged: the worker classifies them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ContextDecorator
from functools import wraps
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, TypeVar, cast

from reconciler.worker.context import (
    AGENT_TIMEOUTS_SEC,
    MAX_TIMEOUT_SEC,
    JobContext,
    current_job,
    timeout_for,
)
from reconciler.worker.errors import JobTimeoutError

F = TypeVar("F", bound=Callable[..., Any])


class with_stage(ContextDecorator):  # noqa: N801 - the document's own word, used like a function
    """One phase of the current job, sync or async. `timeout` bounds it in seconds, within the job's own.

    Without one only the document's agents have a limit (AGENT_TIMEOUTS_SEC); a stage such as asr may take
    hours, and its limits are the lease and max_runtime. A timeout is never over 20 minutes.
    """

    def __init__(
        self,
        stage: str,
        *,
        timeout: float | None = None,
        lease_sec: float | None = None,
        expected_duration_ms: int | None = None,
    ) -> None:
        self._stage = stage
        self._timeout = timeout
        self._options = {"lease_sec": lease_sec, "expected_duration_ms": expected_duration_ms}
        self._outer: float | None = None
        self._clock: asyncio.Timeout | None = None

    def __enter__(self) -> JobContext:
        job = self._job()
        job.check()
        job.set_stage(self._stage, **self._options)
        self._begin(job)
        return job

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        job = self._job()
        try:
            if error is None:
                job.check()
        finally:
            job.limit_at = self._outer

    async def __aenter__(self) -> JobContext:
        job = self._job()
        job.check()
        await asyncio.to_thread(job.set_stage, self._stage, **self._options)
        self._begin(job)
        if job.limit_at is not None:
            # An await that hangs never comes to a check: the loop's own clock ends it.
            self._clock = asyncio.timeout(max(0.0, job.limit_at - time.monotonic()))
            await self._clock.__aenter__()
        return job

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        job = self._job()
        try:
            if self._clock is not None:
                await self._clock.__aexit__(kind, error, trace)
            if error is None:
                job.check()
        except TimeoutError as expired:
            raise JobTimeoutError(f"stage {self._stage} ran past its time") from expired
        finally:
            job.limit_at = self._outer

    def __call__(self, func: F) -> F:
        if not iscoroutinefunction(func):
            return super().__call__(func)

        @wraps(func)
        async def staged(*args: Any, **kwargs: Any) -> Any:
            async with self._recreate_cm():
                return await cast(Callable[..., Awaitable[Any]], func)(*args, **kwargs)

        return cast(F, staged)

    def _recreate_cm(self) -> with_stage:
        # A decorated function may run for many jobs at once: each call needs its own state.
        return with_stage(self._stage, timeout=self._timeout, **self._options)  # type: ignore[arg-type]

    def _begin(self, job: JobContext) -> None:
        self._outer = job.limit_at
        if self._timeout is not None:
            job.limit(min(self._timeout, MAX_TIMEOUT_SEC))
        elif self._stage in AGENT_TIMEOUTS_SEC:
            job.limit(timeout_for(self._stage))

    def _job(self) -> JobContext:
        job = current_job()
        if job is None:
            raise LookupError("with_stage() needs a running job: call it inside a handler")
        return job
