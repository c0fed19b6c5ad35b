"""Dispatch: claim as many jobs as there are free slots, and wait well when there is nothing to do."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psycopg

from reconciler.errors import ReaperError
from reconciler.worker.claim import Claim, claim_next
from reconciler.worker.handlers import Routes
from reconciler.worker.sdk import Sdk
from reconciler.worker.session import Session

T = TypeVar("T")
MAX_PAUSE_SEC = 30.0
CLAIM_LIMIT_SEC = 10.0
START_SEC = 5.0
_log = logging.getLogger(__name__)


class Dispatcher:
    """Claims on a connection and a thread of its own, so that a slow claim stops neither loop nor beats."""

    def __init__(
        self,
        dsn: str,
        routes: Routes,
        worker_id: str,
        sdk: Sdk,
        *,
        poll_sec: float,
        may_claim: Callable[[], bool] = lambda: True,
    ) -> None:
        self._session = Session(dsn, "claim")
        self._routes = routes
        self._worker_id = worker_id
        self._sdk = sdk
        self._poll_sec = poll_sec
        self._may_claim = may_claim
        self._wake = asyncio.Event()
        self._tables = routes.tables()
        self._thread = ThreadPoolExecutor(1, "job-reaper-claim")
        self._failures = 0

    def wake(self) -> None:
        """A slot became free, or work arrived."""
        self._wake.set()

    def wake_soon(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        """The same for other threads."""

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._wake.set)

        return wake

    def close(self) -> None:
        """Give the connection back."""
        self._session.cut()
        self._thread.shutdown(wait=True)
        self._session.close()

    async def run(
        self,
        free_slots: Callable[[], int],
        hold: Callable[[Claim, float], T],
        begin: Callable[[T], None],
        stopping: asyncio.Event,
    ) -> None:
        """Until `stopping`: claim, hold, begin, wait. A slot is free before its claim, never after.

        `hold` runs in the claiming thread, at once: a busy event loop must not keep a job from being beaten.
        `begin` gets every run that was held, also when told to stop meanwhile: it must be given back.
        """
        stopped = asyncio.create_task(stopping.wait())
        try:
            # The beater connects first, and wakes us then. Not a failure yet, unless it takes long.
            starting = time.monotonic() + START_SEC
            while (left := starting - time.monotonic()) > 0 and not stopped.done():
                self._wake.clear()
                if self._may_claim():
                    break
                await self._woken(stopped, left)
            while not stopping.is_set():
                self._wake.clear()
                wanted = free_slots()
                got = await self._fill(wanted, hold, begin, stopping) if wanted > 0 else 0
                if wanted > 0 and got == wanted:
                    continue
                await self._woken(stopped, None if wanted <= 0 else self._pause_sec())
        finally:
            stopped.cancel()

    async def _woken(self, stopped: asyncio.Task[bool], timeout: float | None) -> None:
        woken = asyncio.create_task(self._wake.wait())
        await asyncio.wait({stopped, woken}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()

    async def _fill(
        self,
        wanted: int,
        hold: Callable[[Claim, float], T],
        begin: Callable[[T], None],
        stopping: asyncio.Event,
    ) -> int:
        got = 0
        loop = asyncio.get_running_loop()
        for table in self._tables:
            if got >= wanted or stopping.is_set():
                break
            # The thread's claim always comes back, and what it claimed is begun or given back.
            runs = await loop.run_in_executor(self._thread, self._claim_and_hold, table, wanted - got, hold)
            for run in runs:
                begin(run)
            got += len(runs)
        # The next round begins with another table: a full one must not starve the others.
        self._tables.append(self._tables.pop(0))
        return got

    def _claim_and_hold(self, table: str, limit: int, hold: Callable[[Claim, float], T]) -> list[T]:
        sent_at = time.monotonic()
        return [hold(claim, sent_at) for claim in self._claim(table, limit)]

    def _claim(self, table: str, limit: int) -> list[Claim]:
        if not self._may_claim():
            # What cannot be beaten must not be claimed: it would only be fenced, its attempt spent.
            self._failed(table, "nothing to beat with yet")
            return []
        try:
            # The server gives up before we do: a claim that commits after we stopped listening is nobody's.
            claims = self._session.transact(
                lambda conn: claim_next(
                    conn,
                    table,
                    self._worker_id,
                    stages=self._routes.stages(table),
                    limit=limit,
                    sdk=self._sdk,
                ),
                timeout_sec=CLAIM_LIMIT_SEC,
                lock_timeout_sec=CLAIM_LIMIT_SEC / 2,
            )
        except (psycopg.Error, ReaperError, OSError) as error:
            self._failed(table, str(error).strip())
            return []
        if self._failures:
            _log.info("claims work again", extra={"failures": self._failures})
            self._failures = 0
        return claims

    def _failed(self, table: str, error: str) -> None:
        self._failures += 1
        if self._failures == 1:  # once: an outage must not fill the log
            _log.warning("cannot claim, trying again", extra={"table": table, "error": error})

    def _pause_sec(self) -> float:
        pause = self._poll_sec
        if self._failures:
            pause = min(MAX_PAUSE_SEC, max(pause, 0.5 * 2.0 ** min(self._failures, 8)))
        return pause * random.uniform(0.8, 1.2)  # noqa: S311 - jitter: a fleet must not poll as one
