"""One run of one job inside a worker: start its handler, stop it when it must stop, write its ending."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from reconciler.errors import ReaperError
from reconciler.worker import handlers, metrics
from reconciler.worker.beat import heartbeat_job, set_stage
from reconciler.worker.budget import Budget
from reconciler.worker.claim import Claim
from reconciler.worker.context import JobContext, job_context
from reconciler.worker.ending import Action, Classify, Ending, decide_ending, write_ending
from reconciler.worker.errors import JobTimeoutError, LeaseLostError, WorkerStoppingError
from reconciler.worker.events import ABORTED_SHUTDOWN, emit_event, job_row
from reconciler.worker.finish import ended_as
from reconciler.worker.handlers import Handler
from reconciler.worker.keeper import Keeper
from reconciler.worker.sdk import Sdk
from reconciler.worker.session import LOST_CONNECTION, Connection, Sessions

T = TypeVar("T")
MAX_PAUSE_SEC = 5.0
EVENT_LIMIT_SEC = 1.0
_log = logging.getLogger(__name__)


class RunServices:
    """What all runs of a worker share, and what their contexts ask of the database."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        keeper: Keeper,
        sdk: Sdk,
        classify: Classify,
        release_on_stop: bool,
        scratch_root: Path,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.sessions = sessions
        self.keeper = keeper
        self.sdk = sdk
        self.classify = classify
        self.release_on_stop = release_on_stop
        self.loop = loop
        self._scratch_root = scratch_root
        self._threads = ThreadPoolExecutor(8, "job-reaper-endings")

    async def off_loop(self, work: Callable[[Connection], T]) -> T:
        """A statement, without stopping the event loop."""
        return await self.loop.run_in_executor(self._threads, self.sessions.run, work)

    def cut(self) -> None:
        """End all waits: the worker leaves now."""
        self.sessions.cut()

    def close(self) -> None:
        """Give threads and connections back."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.sessions.close()

    # ── for JobContext ──────────────────────────────────────────────────────────────────────────────

    def set_stage(self, job: JobContext, stage: str, **options: Any) -> None:
        sent_at = time.monotonic()
        claim = self._fenced(job, lambda conn, held: set_stage(conn, held, stage, sdk=self.sdk, **options))
        job.claim = claim
        if job.budget is not None:
            job.budget_at = job.budget.enter(stage, sent_at)
            self.keeper.rebudget(claim, job.budget_at)
        self.keeper.staged(claim, sent_at)

    def emit(
        self, job: JobContext, kind: str, details: Mapping[str, Any] | None, *, patient: bool = True
    ) -> None:
        self._fenced(
            job, lambda conn, held: emit_event(conn, held, kind, details, sdk=self.sdk), patient=patient
        )

    def row(self, job: JobContext) -> dict[str, Any]:
        return self._fenced(job, lambda conn, held: job_row(conn, held, sdk=self.sdk))

    def assert_held(self, job: JobContext) -> None:
        sent_at = time.monotonic()
        renewed = self._fenced(job, lambda conn, held: heartbeat_job(conn, held, sdk=self.sdk))
        self.keeper.renewed(renewed, sent_at)

    def scratch_root(self) -> Path:
        return self._scratch_root

    def _fenced(self, job: JobContext, work: Callable[[Connection, Claim], T], *, patient: bool = True) -> T:
        """Until the database answers: a restart of it should cost a long job nothing. The job's own lease is
        the limit, because a job that is cancelled stops waiting. On the event loop nobody may wait."""
        claim = job.claim
        assert claim is not None
        pause = 0.1
        while True:
            try:
                return self.sessions.run(lambda conn: work(conn, claim))
            except LeaseLostError as error:
                self.keeper.lost(claim, error, "fenced")
                raise
            except LOST_CONNECTION:
                if not patient or _on_event_loop() or job.cancelled.wait(pause):
                    raise
                pause = min(2.0, pause * 2)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class JobRun:
    """From the claim to the ending."""

    def __init__(
        self,
        claim: Claim,
        handler: Handler,
        services: RunServices,
        sent_at: float,
        budget: Budget,
    ) -> None:
        self._handler = handler
        self._services = services
        self._work: asyncio.Future[BaseException | None] | None = None
        self._event: asyncio.Task[None] | None = None
        budget_sec = None if budget.ends_at is None else budget.ends_at - sent_at
        self.job = JobContext(
            claim.id,
            budget_at=budget.ends_at,
            budget=budget,
            claim=claim,
            services=services,
        )
        # From here on it is beaten, whatever the event loop is busy with.
        services.keeper.hold(claim, sent_at=sent_at, budget_sec=budget_sec, cancel=self.cancel)

    @property
    def claim(self) -> Claim:
        assert self.job.claim is not None
        return self.job.claim

    def cancel(self, reason: BaseException) -> None:
        """Tell the handler to stop, from any thread."""
        self.job.cancel(reason)
        if not self._services.loop.is_closed():
            self._services.loop.call_soon_threadsafe(self._cancel_work)

    def _cancel_work(self) -> None:
        # Only a coroutine can be cancelled; a thread finds out by job.check() or job.cancelled.
        if isinstance(self._work, asyncio.Task):
            self._work.cancel()

    async def run(self) -> None:
        """Run the handler, then write what became of it."""
        keeper = self._services.keeper
        began = time.monotonic()
        try:
            if self.job.reason is not None or keeper.sec_to_fence(self.claim) <= 0:
                # Another worker may have it already, or we are leaving: never begun, so never counted.
                ending = Ending(Action.RELEASE, "NOT_BEGUN", str(self.job.reason or "its lease is over"))
                keeper.ending(self.claim)
            else:
                ending = await self._handled()
            if self._event is not None:
                await asyncio.wait({self._event})  # a release would end the fence it is written under
            became = await self._write(ending)
        finally:
            keeper.drop(self.claim)
        with job_context(self.job):
            _log.log(
                logging.INFO if ending.action is Action.DONE else logging.WARNING,
                "job ended",
                extra={
                    "table": self.claim.table,
                    "attempt": self.claim.attempt,
                    "became": became,
                    "code": ending.code,
                    "reason": ending.reason,
                    "seconds": round(time.monotonic() - began, 3),
                },
            )

    async def _handled(self) -> Ending:
        self._work = handlers.start(self._handler, self.job)
        if self.job.reason is not None:
            self._cancel_work()
        error = await self._outcome(self._work)
        self._services.keeper.ending(self.claim)
        return decide_ending(
            self.job,
            error,
            classify=self._services.classify,
            release_on_stop=self._services.release_on_stop,
            scratch_root=str(self._services.scratch_root()),
        )

    async def abort(self) -> None:
        """The worker leaves before this job is done: tell the handler, write the event, change no status."""
        if self.job.reason is None:
            self._event = asyncio.create_task(self._tell_aborted())
        self.cancel(WorkerStoppingError())
        if self._event is not None:
            await asyncio.wait({self._event})

    async def _tell_aborted(self) -> None:
        """Bounded on both sides of the wire: no handler and no ending may wait long for an event."""
        claim, sdk = self.claim, self._services.sdk

        def emit(conn: Connection) -> None:
            with conn.transaction():
                limit = str(int(EVENT_LIMIT_SEC * 1000))
                conn.execute("SELECT set_config('statement_timeout', %s, true)", (limit,))
                emit_event(conn, claim, ABORTED_SHUTDOWN, sdk=sdk)

        try:
            async with asyncio.timeout(EVENT_LIMIT_SEC * 1.5):
                await self._services.off_loop(emit)
        except (psycopg.Error, ReaperError, TimeoutError) as error:
            _log.warning("event not written", extra={"type": ABORTED_SHUTDOWN, "error": str(error).strip()})

    @staticmethod
    async def _outcome(work: asyncio.Future[BaseException | None]) -> BaseException | None:
        try:
            # Shielded: when the worker gives up on a stuck handler it stops waiting, not the handler.
            return await asyncio.shield(work)
        except asyncio.CancelledError as error:
            if work.cancelled():  # cancelled before its first line ran
                return error
            raise

    async def _write(self, ending: Ending) -> str:
        """Until the database answers. A run whose fence does not hold any more has nothing to write."""
        answer_lost = False
        pause = 0.2
        while True:
            claim = self.claim
            try:
                return await self._services.off_loop(
                    lambda conn, claim=claim, ending=ending: write_ending(
                        conn, claim, ending, self._services.sdk
                    )  # type: ignore[misc]
                )
            except LeaseLostError:
                if answer_lost and await self._ended_by_us(ending):
                    return "ended, though the answer was lost"
                self._count_lost()
                return "lost: another run owns it"
            except LOST_CONNECTION as error:
                if not answer_lost:
                    _log.warning("cannot end the job, trying again", extra={"error": str(error).strip()})
                answer_lost = True
                await asyncio.sleep(pause)
                pause = min(MAX_PAUSE_SEC, pause * 2)
            except (psycopg.Error, ReaperError, UnicodeError) as error:
                # The row refuses this ending (a trigger, a narrow column): a plainer one, or none.
                _log.error("the job's ending was refused", extra={"error": str(error).strip()})
                if ending.action is Action.END_LEASE:
                    return "left to its lease"
                ending = (
                    replace(ending, reason=None)
                    if ending.reason is not None
                    else Ending(Action.END_LEASE, ending.code)
                )

    async def _ended_by_us(self, ending: Ending) -> bool:
        try:
            claim, sdk = self.claim, self._services.sdk
            return ending.fits(await self._services.off_loop(lambda conn: ended_as(conn, claim, sdk=sdk)))
        except (psycopg.Error, ReaperError):
            return False

    def _count_lost(self) -> None:
        """A run that was beaten to its end and yet reaped. What the keeper cancelled, it has counted."""
        if not isinstance(self.job.reason, LeaseLostError | JobTimeoutError):
            metrics.LEASES_LOST.add(1, reason="fenced")
