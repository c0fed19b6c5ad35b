"""The one object an application embeds, and every command runs: `Reaper().run_once()`.

    from reconciler import Reaper

    reaper = Reaper()              # DATABASE_URL, REAPER_CONFIG and the documents' variables
    report = reaper.run_once()     # one pass; a value, never an exception, per table
    reaper.start(); ...; reaper.stop()

A pass: take the row in `reaper_state`, describe the tables, survey them, reap them (two at once when both
have much to do), give the row back, tell. Composition happens here and nowhere else.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Self

from reconciler.config import Settings, load
from reconciler.database import Connection, Database
from reconciler.errors import DatabaseError, ReaperError
from reconciler.logs import say
from reconciler.loop import IntervalLoop
from reconciler.model import Policy, TableSpec
from reconciler.plan import FLEET_SIZE, silent_fleet_grace, silent_fleet_sentence
from reconciler.ports import Cluster
from reconciler.reap import reap_table
from reconciler.record import LineBudget, PassRecorder, pass_line
from reconciler.report import Fleet, PassReport, Survey, TableFault, TableReport
from reconciler.shape import read_shape
from reconciler.sql import query
from reconciler.state import TTL_SEC, Held, PassState, Taken, Totals, our_name
from reconciler.store import PgStore
from reconciler.witness import choose_cluster

Stores = dict[str, PgStore]


class Reaper:
    """A configured reaper. `run_once()` may be called from one thread at a time."""

    def __init__(
        self,
        dsn: str | None = None,
        *,
        settings: Settings | None = None,
        env: Mapping[str, str] | None = None,
        cluster: Cluster | None = None,
        with_metrics: bool = False,
        holder: str | None = None,
    ) -> None:
        self.settings = settings or load(env=env)
        self.policy: Policy = self.settings.policy()
        self.specs: tuple[TableSpec, ...] = self.settings.table_specs()
        self._cluster = cluster or choose_cluster(self.settings)
        self._stopping = threading.Event()
        self._database = Database(
            dsn or self.settings.dsn,
            pause=self._stopping.wait,
            statement_timeout_ms=self.settings.statement_timeout_ms,
            lock_timeout_ms=self.settings.lock_timeout_ms,
            connect_timeout_sec=self.settings.connect_timeout_sec,
        )
        self._state = PassState(
            self._database,
            self.settings.state_schema,
            self.settings.state_table,
            [spec.name for spec in self.specs],
            holder or our_name(),
        )
        self.metrics = None
        if with_metrics:
            from reconciler.metrics import Metrics  # noqa: PLC0415 - `once` starts every minute without it

            self.metrics = Metrics(self.policy.sla.factors)
        self._loop: IntervalLoop | None = None
        self._tick: Callable[[], None] = lambda: None
        self._warned_stateless = False

    # ── One pass ────────────────────────────────────────────────────────────────────────────────────

    def run_once(self, *, dry_run: bool | None = None) -> PassReport:
        """One pass over all tables. Errors are in the report; nothing is raised for them."""
        dry = self.settings.dry_run if dry_run is None else dry_run
        report = PassReport(dry_run=dry)
        started = time.perf_counter()
        grace_sec = 0.0
        try:
            self._refuse_read_only(dry_run=dry)
            taken = self._take(dry_run=dry)
            if isinstance(taken, Held):
                report.skipped = f"{taken.holder} runs this pass (for {taken.for_sec:.0f} s at most)"
            else:
                served = False
                try:
                    grace_sec = self._serve(report, taken, dry_run=dry)
                    served = True
                finally:
                    if not dry:
                        # Under a full hold nothing was tried: the gap goes on, and with it the grace's clock.
                        good = served and report.ok and not report.stopped and grace_sec != math.inf
                        self._state.give_back(success=good)
                        self._warn_stateless()
        except ReaperError as error:
            say("pass ended early", level=logging.ERROR, fields={"code": error.code, "error": error.message})
            self._blame(report, error)
        report.pass_ms = (time.perf_counter() - started) * 1000
        if report.stopped and not report.skipped:
            report.skipped = "ended early: stopped, or another reaper has taken this pass over"
        brake = silent_fleet_sentence(grace_sec) if grace_sec else None
        pass_line(report, counters_kept=self._state.counting and not dry, brake=brake)
        if self.metrics is not None:
            self._tell_metrics(report)
        return report

    def totals(self) -> Totals | None:
        """What Postgres has counted, over all reapers and restarts; None where it cannot be read."""
        if not self._state.usable:
            return None
        try:
            return self._state.totals()
        except ReaperError as error:
            say("the counters cannot be read", level=logging.WARNING, fields={"error": error.message})
            return None

    # ── Every interval, inside an application ───────────────────────────────────────────────────────

    def start(self) -> None:
        """Run a pass every interval in a thread of our own, until stop()."""
        if self._loop is not None:
            raise RuntimeError("this Reaper is already running: call stop() first")
        self._stopping.clear()
        self._loop = self.interval_loop()
        self._loop.start()

    def interval_loop(self) -> IntervalLoop:
        """The loop that start() runs in a thread and `job-reaper run` in its own; request_stop() ends it."""
        loop = IntervalLoop(self.run_once, self.policy.interval_sec, self._stopping)
        self._tick = loop.tick
        return loop

    def stop(self, timeout: float | None = 60.0) -> None:
        """End after the batch under way; returns once the thread has ended and the connection is closed."""
        self._stopping.set()
        if self._loop is not None:
            self._loop.join(timeout)
            self._loop = None
        self._database.close()
        self._stopping.clear()  # a later run_once() is a new wish

    def request_stop(self) -> None:
        """What a signal handler calls: no new batch is begun.

        From a thread of its own: the handler may have interrupted this very event's lock.
        """
        threading.Thread(target=self._stopping.set, daemon=True).start()

    def close(self) -> None:
        """Close the connection; the next pass would open it again."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── The steps of a pass ─────────────────────────────────────────────────────────────────────────

    def _refuse_read_only(self, *, dry_run: bool) -> None:
        row = self._database.run(lambda conn: conn.execute(query("describe", "server")).fetchone())
        if row and row[0] and not dry_run:
            raise DatabaseError(
                "the database is read-only (a standby, or default_transaction_read_only): point DATABASE_URL"
                " at the primary",
                code="read_only",
            )

    def _take(self, *, dry_run: bool) -> Taken | Held:
        self._state.check()
        taken = Taken() if dry_run else self._state.take(gap_sec=3 * self.policy.interval_sec)
        self._warn_stateless()
        return taken

    def _warn_stateless(self) -> None:
        """Once in the life of a process: a pass without its memory is allowed, a silent one is not."""
        if self._state.usable or self._warned_stateless:
            return
        self._warned_stateless = True
        say(
            "no reaper_state: nothing is counted and reapers do not take turns; run job-reaper migrate",
            level=logging.WARNING,
            fields={"table": self._state.table, "error": self._state.trouble},
        )

    def _serve(self, report: PassReport, taken: Taken, *, dry_run: bool) -> float:
        stores: Stores = {}
        surveys: dict[str, Survey] = {}
        fleets: list[Fleet] = []
        for spec in self.specs:
            started = time.perf_counter()
            try:
                stores[spec.name] = self._store(spec, self._database)
                surveys[spec.name] = stores[spec.name].survey()
                fleets += self._fleet(stores[spec.name])
            except ReaperError as error:
                stores.pop(spec.name, None)
                surveys.pop(spec.name, None)
                broken = TableReport(spec.name, error=TableFault(error.code, error.message))
                broken.scan_ms = (time.perf_counter() - started) * 1000
                PassRecorder(self.metrics).table(broken, dry_run=dry_run)
                report.tables[spec.name] = broken
        grace_sec = silent_fleet_grace(self.policy.brake, fleets, taken.resumed_age_sec)
        keeper = _Keeper(self._state, self._stopping, self._tick, held=not dry_run)
        lines = LineBudget()

        def reap(store: PgStore, may_go_on: Callable[[], bool]) -> TableReport:
            return reap_table(
                store,
                self._cluster,
                self.policy,
                PassRecorder(self.metrics, lines),  # one each: tables may run side by side
                grace_sec=grace_sec,
                dry_run=dry_run,
                survey=surveys[store.spec.name],
                may_go_on=may_go_on,
            )

        much = [name for name, survey in surveys.items() if survey.candidates > self.policy.batch_size]
        together = much if len(much) > 1 and self.settings.parallel > 1 else []
        if together:
            report.tables.update(self._reap_together([stores[name].spec for name in together], reap, keeper))
        for name, store in stores.items():
            if name not in report.tables:
                report.tables[name] = reap(store, keeper.may_go_on_and_keep)
        # The order of the configuration, whatever finished first.
        report.tables = {spec.name: report.tables[spec.name] for spec in self.specs}
        return grace_sec

    def _reap_together(
        self,
        specs: list[TableSpec],
        reap: Callable[[PgStore, Callable[[], bool]], TableReport],
        keeper: _Keeper,
    ) -> dict[str, TableReport]:
        """Large tables side by side, each on a connection of its own; the pass is kept from this thread.

        A table that gets no connection (a role's or a pool's limit) is left to the one we have.
        """

        def one(spec: TableSpec) -> TableReport | None:
            database = self._database.another()
            try:
                store = self._store(spec, database)
            except ReaperError as error:
                say(
                    "no second connection: the tables are served one after the other",
                    level=logging.WARNING,
                    fields={"table": spec.name, "error": error.message},
                )
                return None
            try:
                return reap(store, keeper.may_go_on)
            finally:
                database.close()

        with ThreadPoolExecutor(self.settings.parallel, thread_name_prefix="reap") as pool:
            futures: dict[str, Future[TableReport | None]] = {
                spec.name: pool.submit(one, spec) for spec in specs
            }
            while wait_for(futures.values(), timeout=TTL_SEC / 3).not_done:
                keeper.may_go_on_and_keep()
        reports = {name: future.result() for name, future in futures.items()}
        return {name: report for name, report in reports.items() if report is not None}

    def _store(self, spec: TableSpec, database: Database) -> PgStore:
        def work(conn: Connection) -> PgStore:
            return PgStore(database, read_shape(conn, spec), self.policy, count=self._state.count)

        return database.run(work)

    def _fleet(self, store: PgStore) -> list[Fleet]:
        """Who holds jobs of this table: only asked where the silent-fleet brake is set."""
        if self.policy.brake.outage_grace_sec == 0:
            return []
        return [store.fleet(enough=FLEET_SIZE, silent_sec=3.0 * self.policy.heartbeat_sec)]

    def _blame(self, report: PassReport, error: ReaperError) -> None:
        """The database as a whole failed: every table that has no result yet carries the reason."""
        recorder = PassRecorder(self.metrics)
        for spec in self.specs:
            if spec.name not in report.tables:
                broken = TableReport(spec.name, error=TableFault(error.code, error.message))
                report.tables[spec.name] = broken
                recorder.table(broken, dry_run=report.dry_run)

    def _tell_metrics(self, report: PassReport) -> None:
        assert self.metrics is not None
        counted = self.totals() if self._state.counting else None
        self.metrics.passed(report, counted, now=time.time())


class _Keeper:
    """Keeps the pass ours while it runs, and says when it must end."""

    def __init__(
        self, state: PassState, stopping: threading.Event, tick: Callable[[], None], *, held: bool
    ) -> None:
        self._state = state
        self._tick = tick
        self._stopping = stopping
        self._held = held
        self._lost = threading.Event()
        self._kept_at = time.monotonic()

    def may_go_on(self) -> bool:
        self._tick()
        return not (self._stopping.is_set() or self._lost.is_set())

    def may_go_on_and_keep(self) -> bool:
        """Only from the thread that owns the main connection."""
        if self._held and time.monotonic() - self._kept_at > TTL_SEC / 3:
            self._kept_at = time.monotonic()
            if not self._state.keep():
                self._lost.set()
                say("another reaper has taken this pass over: ending here", level=logging.WARNING)
        return self.may_go_on()
