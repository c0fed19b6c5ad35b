"""Handlers: which function runs which job, and how it is run.

`async def` handlers run on the worker's event loop; plain `def` handlers each in a thread of their own. The
threads are daemons: a handler that never returns must not keep a worker from leaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable, iscoroutinefunction
from typing import Any, TypeAlias, TypeVar, cast

from reconciler.worker.claim import Claim, check_stage
from reconciler.worker.context import JobContext, current_job, job_context
from reconciler.worker.errors import ArgumentError, JobError
from reconciler.worker.sdk import Sdk

T = TypeVar("T")
THREAD_POLL_SEC = 0.05
Handler: TypeAlias = Callable[[JobContext], Any]


class Routes:
    """Handlers by table (`"jobs"`) or by table and stage (`"jobs:clip"`); the more precise one wins."""

    def __init__(self, handlers: Mapping[str, Handler], sdk: Sdk) -> None:
        self._whole: dict[str, Handler] = {}
        self._staged: dict[tuple[str, str], Handler] = {}
        if not handlers:
            raise ArgumentError("handlers", handlers, "at least one", 'for example {"jobs": handle}')
        for key, handler in handlers.items():
            if not callable(handler):
                raise ArgumentError(f"handlers[{key!r}]", handler, "a function that takes a JobContext")
            table, colon, stage = key.partition(":")
            sdk.spec(table)
            if colon:
                self._staged[table, check_stage(stage)] = handler
            else:
                self._whole[table] = handler

    def tables(self) -> list[str]:
        """The tables this worker serves, in the order they were named."""
        return list(dict.fromkeys([*self._whole, *(table for table, _ in self._staged)]))

    def stages(self, table: str) -> list[str] | None:
        """The stages to claim; None for all. What no handler could run is left for another worker."""
        if table in self._whole:
            return None
        return [stage for name, stage in self._staged if name == table]

    def find(self, claim: Claim) -> Handler:
        """The handler of this job."""
        if claim.stage is not None and (claim.table, claim.stage) in self._staged:
            return self._staged[claim.table, claim.stage]
        return self._whole[claim.table]


def start(handler: Handler, job: JobContext) -> asyncio.Future[BaseException | None]:
    """Run a handler for a job. The future's *result* is the error it raised, or None.

    A handler may raise anything, SystemExit and StopIteration included; as results these cannot stop the
    event loop or upset a future.
    """
    if iscoroutinefunction(handler) or iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004
        return asyncio.ensure_future(_run_async(handler, job))
    return _run_in_thread(handler, job)


async def _run_async(
    handler: Callable[[JobContext], Awaitable[Any]], job: JobContext
) -> BaseException | None:
    error: BaseException | None = None
    with job_context(job):
        try:
            await handler(job)
        except BaseException as raised:  # noqa: BLE001 - the worker decides about every error
            error = raised
    # Not stopped yet: it is beaten on, and whoever waits for it may give up, as for a plain handler.
    while not all(ended.is_set() for ended in job.threads):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(THREAD_POLL_SEC)
    return error


async def to_thread(func: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """asyncio.to_thread for handlers: the job is not given back before the thread has ended.

    Cancelling an `async` handler ends its await, never a thread. With asyncio.to_thread the worker would
    believe the work stopped, and release the job or end its lease while it goes on.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()
    job = current_job()
    ended = threading.Event()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(cast(T, result))
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(func, *args, **kwargs)
        except BaseException as raised:  # noqa: BLE001 - raised again by the await
            # A future cannot carry StopIteration.
            error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        ended.set()
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, error)

    if job is not None:
        job.threads.append(ended)
    threading.Thread(target=run, name="job-reaper-to-thread", daemon=True).start()
    return await future


def _run_in_thread(handler: Handler, job: JobContext) -> asyncio.Future[BaseException | None]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[BaseException | None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if not future.done():
            future.set_result(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            with job_context(job):
                result = handler(job)
            if isawaitable(result):
                if hasattr(result, "close"):
                    result.close()
                error = JobError("HANDLER_NOT_ASYNC", "a plain function returned an awaitable: make it async")
        except BaseException as raised:  # noqa: BLE001 - the worker decides about every error
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, error)

    context = contextvars.copy_context()
    name = f"job {job.job_id}"
    threading.Thread(target=lambda: context.run(run), name=name, daemon=True).start()
    return future
