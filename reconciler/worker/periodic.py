"""Periodic tasks: a cost update every 30 seconds, a clean-up every hour, once in the whole fleet.

Exclusive means what the documents' queue policy means: never twice at once. A row of `reaper_state` says who
runs the task and until when; it is renewed while the task runs, and a worker that cannot renew it in time
(monotonic clock) stops the task before another one may start it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

import psycopg
from psycopg import sql

from reconciler.sql import query
from reconciler.worker import handlers
from reconciler.worker.context import JobContext
from reconciler.worker.errors import LeaseLostError, WorkerStoppingError
from reconciler.worker.session import Connection, Session

TTL_SEC = 30.0
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

    async def run(self, stopping: asyncio.Event) -> None:
        """Until the worker stops. An error is logged, and the next turn comes all the same."""
        threads = ThreadPoolExecutor(1, "job-reaper-periodic")
        stop = asyncio.create_task(stopping.wait())
        try:
            while not stopping.is_set():
                began = time.monotonic()
                sent_at = began
                if not self._exclusive or await self._statement(threads, "periodic_take"):
                    ok = await self._turn(threads, sent_at, stop)
                    if self._exclusive:
                        await self._statement(threads, "periodic_give", ok=ok)
                pause = max(0.0, began + self._every_sec * random.uniform(0.95, 1.0) - time.monotonic())  # noqa: S311
                await asyncio.wait({stop}, timeout=pause)
        finally:
            stop.cancel()
            self._session.cut()
            threads.shutdown(wait=True)
            self._session.close()

    async def _turn(self, threads: ThreadPoolExecutor, sent_at: float, stop: asyncio.Task[Any]) -> bool:
        """Run the task once, renewing our row until it ends. True when it ended well."""
        job = JobContext(self._scope, self._holder)
        work = handlers.start(self._as_handler(), job)
        keep_until = sent_at + self._ttl_sec * 0.8
        while True:
            await asyncio.wait({work, stop}, timeout=self._ttl_sec / 3, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                break
            if stop.done():
                _stop(work, job, WorkerStoppingError())
                await asyncio.wait({work}, timeout=2.0)
                break
            if self._exclusive:
                sent_at = time.monotonic()
                kept = await self._statement(threads, "periodic_keep")
                if kept:
                    keep_until = sent_at + self._ttl_sec * 0.8
                elif kept is False or time.monotonic() + self._ttl_sec / 3 >= keep_until:
                    _stop(work, job, LeaseLostError("reaper_state", self._scope, self._holder, 0))
        error = work.result() if work.done() and not work.cancelled() else job.reason
        if error is not None:
            _log.error("periodic task failed", extra={"task": self.name, "error": repr(error)})
        return error is None

    async def _statement(self, threads: ThreadPoolExecutor, name: str, **params: Any) -> bool | None:
        """True or False as the database says; None when it does not answer."""
        values = {
            "scope": self._scope, "holder": self._holder, "ttl_sec": self._ttl_sec,
            "every_sec": self._every_sec, **params,
        }  # fmt: skip
        statement = query("worker", name).format(state=self._state)

        def work(conn: Connection) -> bool:
            return conn.execute(statement, values).fetchone() is not None

        try:
            answer = await asyncio.get_running_loop().run_in_executor(
                threads, partial(self._session.run, work)
            )
        except psycopg.Error as error:
            if not self._failed:
                _log.warning(
                    "periodic task waits for the database",
                    extra={"task": self.name, "error": str(error).strip()},
                )
            self._failed = True
            return None
        self._failed = False
        return answer

    def _as_handler(self) -> handlers.Handler:
        task = self._task
        if iscoroutinefunction(task):

            async def run_async(_: JobContext) -> None:
                await task()

            return run_async
        return lambda _: task()


def _stop(work: asyncio.Future[BaseException | None], job: JobContext, reason: BaseException) -> None:
    job.cancel(reason)
    if isinstance(work, asyncio.Task):
        work.cancel()
