"""Periodic tasks: a cost update every 30 seconds, a clean-up every hour, once in the whole fleet.

Exclusive means what the documents' queue policy means: never twice at once. A row of `reaper_state` says who
runs the task and until when; it is renewed while the task runs, and a worker that cannot renew it in time
(monotonic clock) stops the task before another one may start it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from reconciler.sql import query
from reconciler.worker import handlers
from reconciler.worker.context import JobContext
from reconciler.worker.errors import LeaseLostError, WorkerStoppingError
from reconciler.worker.session import Connection, Session

TTL_SEC = 30.0
STOP_GRACE_SEC = 2.0
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Periodic:
    """One task and its timer. It runs in a job context too: `check_job_timeout()` stops a plain function."""

    def __init__(
        self,
        name: str,
        every_sec: float,
        task: Callable[[], Any],
        *,
        exclusive: bool,
        dsn: str,
        worker_id: str,
        state: tuple[str, ...],
        ttl_sec: float = TTL_SEC,
    ) -> None:
        self.name = name
        self._every_sec = every_sec
        self._task = task
        self._exclusive = exclusive
        self._holder = worker_id
        self._scope = f"periodic:{name}"
        self._ttl_sec = ttl_sec
        self._state = sql.Identifier(*state)
        self._session = Session(dsn, "periodic")
        self._failed = False
        self._kept = False
        self._left = False

    async def run(self, stopping: asyncio.Event) -> None:
        """Until the worker stops. An error is logged, and the next turn comes all the same."""
        stop = asyncio.create_task(stopping.wait())
        try:
            while not stopping.is_set():
                began = time.monotonic()
                if not self._exclusive or await _in_thread(lambda: self.statement("periodic_take") is True):
                    await self._turn(stop, began)
                pause = max(0.0, began + self._every_sec * random.uniform(0.95, 1.0) - time.monotonic())  # noqa: S311
                await asyncio.wait({stop}, timeout=pause)
        finally:
            stop.cancel()
            self._left = True
            if not self._kept:
                self._session.cut()
                self._session.close()

    async def _turn(self, stop: asyncio.Task[Any], sent_at: float) -> None:
        """Run the task once; an exclusive one's row is kept until the work has ended."""
        job = JobContext(self._scope, self._holder)
        loop = asyncio.get_running_loop()
        run = _Run(self._task)
        work: asyncio.Future[BaseException | None]

        def cancel(reason: BaseException) -> None:
            job.cancel(reason)
            if not loop.is_closed():
                loop.call_soon_threadsafe(_cancel, work)

        work = handlers.start(run.handler(), job)
        work.add_done_callback(lambda _: run.ended.set())
        given: asyncio.Future[bool] | None = None
        if self._exclusive:
            self._kept = True
            row = _Row(self, run, sent_at, cancel=cancel, ttl_sec=self._ttl_sec, lost=self._lost)
            threading.Thread(target=row.watch, name="job-reaper-periodic-clock", daemon=True).start()
            given = _in_thread(lambda: self._keep(row))
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            cancel(WorkerStoppingError())
            await asyncio.wait({work}, timeout=STOP_GRACE_SEC)
        if not work.done():
            # A plain function that does not listen. It still works, so its row stays ours.
            _log.warning("periodic task did not stop", extra={"task": self.name})
            return
        error = job.reason if work.cancelled() else work.result() or job.reason
        if error is not None:
            _log.error("periodic task failed", extra={"task": self.name, "error": repr(error)})
        if given is not None:
            await asyncio.wait({given})

    def _keep(self, row: _Row) -> bool:
        """In a thread of its own: neither a busy event loop nor a worker that has left ends it."""
        try:
            return row.keep()
        finally:
            self._kept = False
            if self._left:
                self._session.close()

    def _lost(self, why: str) -> LeaseLostError:
        return LeaseLostError("reaper_state", self._scope, self._holder, 0, why=why)

    def statement(self, name: str, **params: Any) -> bool | None:
        """True or False as the database says; None when it does not answer in time."""
        values = {
            "scope": self._scope, "holder": self._holder, "ttl_sec": self._ttl_sec,
            "every_sec": self._every_sec, **params,
        }  # fmt: skip
        statement = query("worker", name).format(state=self._state)
        limit = self._ttl_sec / 3

        def work(conn: Connection) -> bool:
            return conn.execute(statement, values).fetchone() is not None

        try:
            answer = self._session.transact(work, timeout_sec=limit, lock_timeout_sec=limit)
        except (psycopg.Error, OSError) as error:
            if not self._failed:
                _log.warning(
                    "periodic task waits for the database",
                    extra={"task": self.name, "error": str(error).strip()},
                )
            self._failed = True
            return None
        self._failed = False
        return answer


class _Run:
    """One run of the task. It tells its end by itself, because the event loop may be gone by then."""

    def __init__(self, task: Callable[[], Any]) -> None:
        self._task = task
        self.ended = threading.Event()
        self.well = False

    def handler(self) -> handlers.Handler:
        if iscoroutinefunction(self._task):
            return self._run_async
        return self._run_plain

    async def _run_async(self, job: JobContext) -> None:
        try:
            await self._task()
            self.well = job.reason is None
        finally:
            self.ended.set()

    def _run_plain(self, job: JobContext) -> Any:
        try:
            result = self._task()
            self.well = job.reason is None
            return result
        finally:
            self.ended.set()


class _Row:
    """The row that says who runs the task: renewed while it runs, given back when it has ended."""

    def __init__(
        self,
        task: Periodic,
        run: _Run,
        sent_at: float,
        *,
        cancel: Callable[[BaseException], None],
        ttl_sec: float,
        lost: Callable[[str], LeaseLostError],
    ) -> None:
        self._task = task
        self._run = run
        self._cancel = cancel
        self._ttl_sec = ttl_sec
        self._lost = lost
        self._until = self._end_of(sent_at)

    def watch(self) -> None:
        """Stop the task before its row runs out, by a clock that no statement can hold up."""
        while not self._run.ended.wait(max(0.0, self._until - time.monotonic())):
            if time.monotonic() >= self._until:
                self._cancel(self._lost("its row could not be renewed in time"))
                return

    def keep(self) -> bool:
        """Renew until the work has ended, then give the row back. False when somebody else has it."""
        pause = self._ttl_sec / 3
        while not self._run.ended.wait(pause):
            sent_at = time.monotonic()
            kept = self._task.statement("periodic_keep")
            if kept is False:
                self._cancel(self._lost("its row ran out"))
                return False
            if kept:
                self._until = self._end_of(sent_at)
            pause = self._ttl_sec / (3 if kept else 15)
        return bool(self._task.statement("periodic_give", ok=self._run.well))

    def _end_of(self, sent_at: float) -> float:
        return sent_at + self._ttl_sec * 0.8


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """A daemon thread: what hangs there keeps no process from leaving. `work` raises nothing."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(answer: T) -> None:
        if not future.done():
            future.set_result(answer)

    def run() -> None:
        answer = work()
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, answer)

    threading.Thread(target=run, name="job-reaper-periodic", daemon=True).start()
    return future


def _cancel(work: asyncio.Future[Any]) -> None:
    if isinstance(work, asyncio.Task):
        work.cancel()
