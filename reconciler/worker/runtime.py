"""Worker: claims jobs, runs their handlers, keeps their leases, ends them; and leaves politely.

    worker = Worker(dsn, {"jobs:clip": clip, "asr_jobs": transcribe})
    worker.every(30, update_costs)
    worker.run()

Connections per worker: one for claims, one for beats, one to listen, and up to eight for endings and
what handlers ask for, opened when needed. Handlers never share the connection that beats.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from reconciler.worker import metrics
from reconciler.worker.beat_process import ProcessBeater
from reconciler.worker.beater import Beater
from reconciler.worker.budget import Budgets
from reconciler.worker.claim import Claim
from reconciler.worker.dispatch import Dispatcher
from reconciler.worker.ending import Classify
from reconciler.worker.errors import ArgumentError, WorkerStoppingError
from reconciler.worker.handlers import Handler, Routes
from reconciler.worker.identity import worker_identity
from reconciler.worker.job_run import JobRun, RunServices
from reconciler.worker.keeper import Keeper
from reconciler.worker.listen import CHANNEL, Listener
from reconciler.worker.periodic import STOP_GRACE_SEC, Periodic
from reconciler.worker.retry import classify as classify_error
from reconciler.worker.sdk import Sdk, current
from reconciler.worker.session import Sessions

MAX_SESSIONS = 8
ABORT_GRACE_SEC = 2.0
_log = logging.getLogger(__name__)


class Worker:
    """One process's share of the queue. Options are keyword-only; the defaults are the safe ones.

    - concurrency: jobs at once (MAX_CONCURRENCY).
    - poll_sec: how often an idle worker looks; listen: the channel that wakes it, None for polling only.
    - heartbeat: "thread", or "process" for handlers whose C code holds the GIL.
    - max_runtime: hard budget in seconds, for all jobs or by stage or table.
    - shutdown_timeout_sec: how long running jobs may go on after SIGTERM; leave 5 s of
      terminationGracePeriodSeconds beyond it.
    - on_shutdown: a job not done by then is left to the reaper ("end_lease", the attempt counts) or queued
      at once ("release", attempt refunded).
    - classify: errors -> RetryDecision.
    """

    def __init__(
        self,
        dsn: str,
        handlers: Mapping[str, Handler],
        *,
        worker_id: str | None = None,
        concurrency: int | None = None,
        poll_sec: float = 5.0,
        listen: str | None = CHANNEL,
        heartbeat: Literal["thread", "process"] = "thread",
        max_runtime: float | Mapping[str, float] | None = None,
        shutdown_timeout_sec: float = 25.0,
        on_shutdown: Literal["end_lease", "release"] = "end_lease",
        classify: Classify = classify_error,
        scratch_dir: str | Path | None = None,
        metrics_port: int | None = None,
        sdk: Sdk | None = None,
    ) -> None:
        self.sdk = current(sdk)
        self.routes = Routes(handlers, self.sdk)
        self.worker_id = worker_id if worker_id is not None else worker_identity()
        self.concurrency = self.sdk.max_concurrency if concurrency is None else concurrency
        _check("concurrency", self.concurrency, self.concurrency >= 1, "at least 1")
        _check("poll_sec", poll_sec, poll_sec > 0, "more than 0 seconds")
        _check("heartbeat", heartbeat, heartbeat in ("thread", "process"), "thread or process")
        _check("on_shutdown", on_shutdown, on_shutdown in ("end_lease", "release"), "end_lease or release")
        _check("shutdown_timeout_sec", shutdown_timeout_sec, shutdown_timeout_sec >= 0, "0 seconds or more")
        self._dsn = dsn
        self._listen = listen
        self._poll_sec = poll_sec
        self._heartbeat = heartbeat
        self._budgets = Budgets(max_runtime)
        self._shutdown_timeout_sec = shutdown_timeout_sec
        self._release_on_stop = on_shutdown == "release"
        self._classify = classify
        self._scratch_root = Path(scratch_dir or self.sdk.scratch_dir or tempfile.gettempdir()).resolve()
        self.metrics_port = metrics_port
        self._periodic: list[Periodic] = []
        self._runs: dict[asyncio.Task[None], JobRun] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked = 0
        self._asking = threading.Lock()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    def every(
        self,
        interval_sec: float,
        task: Callable[[], Any],
        *,
        exclusive: bool = True,
        name: str | None = None,
    ) -> None:
        """Run `task` every so often; exclusive: once at a time and once per interval in the whole fleet.

        The name is what the fleet knows the task by; by default it is the function's own.
        """
        _check("interval_sec", interval_sec, interval_sec > 0, "more than 0 seconds")
        known = name or str(getattr(task, "__qualname__", task))
        if any(one.name == known for one in self._periodic):
            # Two tasks of one name would share a row, and so hold each other off for ever.
            raise ArgumentError(
                "name", known, "a name that no other task of this worker has", 'pass name="..." to every()'
            )
        self._periodic.append(
            Periodic(
                known,
                interval_sec,
                task,
                exclusive=exclusive,
                dsn=self._dsn,
                worker_id=self.worker_id,
                state=self.sdk.state,
            )
        )

    def run(self) -> None:
        """Work until SIGTERM or SIGINT; a second signal means now."""
        # Not asyncio.run(): it waits for ever for a handler that swallows its cancellation.
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self.run_async())
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=1.0))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def stop(self) -> None:
        """What a signal does: the first call stops politely, the second at once. From any thread."""
        with self._asking:
            self._stop_asked += 1
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._notice_stop)

    def is_stopping(self) -> bool:
        """Has the worker taken notice of a signal or of `stop()`? It claims no more."""
        return self._stopping.is_set()

    async def run_async(self) -> None:
        """The same inside a running event loop. Signals are handled in the main thread only.

        Cancelling it is what a second signal is: running jobs are told to stop and ended while they are still
        beaten, a claim that is just coming back is given back, and then the cancellation is raised.
        """
        work = asyncio.create_task(self._work())
        cancelled: asyncio.CancelledError | None = None
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError as error:  # raised again below; the way out takes seconds at most
                cancelled = error
                self._stop_asked = 2
                self._notice_stop()
        if cancelled is not None:
            raise cancelled from (None if work.cancelled() else work.exception())
        work.result()

    async def _work(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        signals = self._handle_signals(loop)
        sessions = Sessions(self._dsn, "endings", min(self.concurrency, MAX_SESSIONS))
        keeper = Keeper(on_change=lambda: beater.poke(), catch_up=lambda: beater.catch_up())  # noqa: PLW0108 - made first
        beater = (ProcessBeater if self._heartbeat == "process" else Beater)(
            self._dsn, keeper, self.sdk, on_ready=lambda _: dispatcher.wake_soon(loop)()
        )
        dispatcher = Dispatcher(
            self._dsn,
            self.routes,
            self.worker_id,
            self.sdk,
            poll_sec=self._poll_sec,
            may_claim=beater.ready,
        )
        listener = Listener(self._dsn, self._listen, dispatcher.wake_soon(loop)) if self._listen else None
        endpoint = metrics.serve(self.metrics_port) if self.metrics_port is not None else None
        if endpoint is not None:
            self.metrics_port = endpoint.server_port  # 0 asked for any free one
        services = RunServices(
            sessions=sessions,
            keeper=keeper,
            sdk=self.sdk,
            classify=self._classify,
            release_on_stop=self._release_on_stop,
            scratch_root=self._scratch_root,
            loop=loop,
        )
        keeper.start()
        beater.start()
        if listener is not None:
            listener.start()
        periodic = [asyncio.create_task(one.run(self._stopping)) for one in self._periodic]
        self._notice_stop()
        _log.info("worker started", extra={"holder": self.worker_id, "concurrency": self.concurrency})

        def hold(claim: Claim, sent_at: float) -> JobRun:
            return JobRun(
                claim, self.routes.find(claim), services, sent_at, self._budgets.begin(claim, sent_at)
            )

        def begin(run: JobRun) -> None:
            if self._stopping.is_set():  # claimed too late: given back, never begun
                run.cancel(WorkerStoppingError())
            task = asyncio.create_task(run.run())
            self._runs[task] = run
            metrics.CONCURRENT_JOBS.set(len(self._runs))
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[None]) -> None:
            self._runs.pop(task, None)
            metrics.CONCURRENT_JOBS.set(len(self._runs))
            dispatcher.wake()
            if not task.cancelled() and task.exception() is not None:
                _log.error("a run broke", exc_info=task.exception())

        try:
            await dispatcher.run(lambda: self.concurrency - len(self._runs), hold, begin, self._stopping)
            await self._drain(services)
        finally:
            await self._end_periodic(periodic)
            if listener is not None:
                listener.stop()
            beater.stop()
            keeper.stop()
            services.close()
            dispatcher.close()
            if endpoint is not None:
                endpoint.shutdown()
                endpoint.server_close()
            for number in signals:
                loop.remove_signal_handler(number)
            _log.info("worker stopped", extra={"holder": self.worker_id})

    # ── leaving ─────────────────────────────────────────────────────────────────────────────────────

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> list[signal.Signals]:
        if threading.current_thread() is not threading.main_thread():
            return []
        numbers = [signal.SIGTERM, signal.SIGINT]
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        return numbers

    def _notice_stop(self) -> None:
        if self._stop_asked >= 1:
            self._stopping.set()
        if self._stop_asked >= 2:
            self._hurry.set()

    async def _end_periodic(self, tasks: list[asyncio.Task[None]]) -> None:
        """What ends in time gives its row back."""
        self._stopping.set()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_GRACE_SEC + 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, services: RunServices) -> None:
        """Let running jobs finish, beats and all; then say which were aborted, and stop them."""
        if self._runs:
            _log.info("waiting for running jobs", extra={"jobs": len(self._runs)})
            hurry = asyncio.create_task(self._hurry.wait())
            waiting: set[asyncio.Task[Any]] = {asyncio.create_task(asyncio.wait(list(self._runs))), hurry}
            await asyncio.wait(
                waiting, timeout=self._shutdown_timeout_sec, return_when=asyncio.FIRST_COMPLETED
            )
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not self._runs:
            return
        left = dict(self._runs)
        await asyncio.wait(
            [asyncio.create_task(run.abort()) for run in left.values()], timeout=ABORT_GRACE_SEC
        )
        _, stuck = await asyncio.wait(list(left), timeout=ABORT_GRACE_SEC)
        for task in stuck:
            # Its lease is left to run out: a handler that still works must not be run twice on purpose.
            _log.warning("handler did not stop", extra={"job_id": str(left[task].job.job_id)})
            task.cancel()
        services.cut()
        await asyncio.gather(*stuck, return_exceptions=True)


def _check(key: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ArgumentError(key, value, allowed)
