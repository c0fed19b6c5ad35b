"""The pass over one table: the only place where the steps meet.

scan (survey) -> evidence and verdict (cluster) -> plan (brakes) -> apply (batches) -> record. Whatever goes
wrong becomes part of the table's report; no exception crosses this line, so that one table's failure
never stops the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

from reconciler.errors import ReaperError, RowError, TableError, TransientError
from reconciler.model import (
    NextRow,
    Outcome,
    Page,
    PageRequest,
    Poison,
    Policy,
    Rulebook,
    Scan,
    Survey,
    TableFault,
    TableReport,
)
from reconciler.plan import share_brake
from reconciler.ports import Cluster, JobStore, Recorder

LIST_AT_MOST = 1000
"""Ids per list in a report, and jobs told one by one in the log (SPEC.md decision 14)."""

LOCKED_OUT_AFTER = 3
"""Single rows in a row that only ever wait for a lock: then the table is locked, not the rows odd."""


def reap_table(
    store: JobStore,
    cluster: Cluster,
    policy: Policy,
    recorder: Recorder,
    *,
    grace_sec: float = 0.0,
    dry_run: bool = False,
    survey: Survey | None = None,
    may_go_on: Callable[[], bool] = lambda: True,
) -> TableReport:
    """Reap one table and report. `may_go_on` is asked before every batch (shutdown, lost exclusivity)."""
    report = TableReport(store.spec.name)
    started = perf_counter()
    try:
        _Sweep(
            store,
            cluster,
            policy,
            recorder,
            report=report,
            grace_sec=grace_sec,
            dry_run=dry_run,
            may_go_on=may_go_on,
        ).run(survey)
    except ReaperError as error:
        report.error = TableFault(error.code, error.message)
    except Exception as error:  # noqa: BLE001 - the line no exception crosses; it is told with its traceback
        report.error = TableFault("internal", f"{type(error).__name__}: {error}")
        recorder.crashed(report.name, error)
    report.scan_ms = (perf_counter() - started) * 1000
    recorder.table(report, dry_run=dry_run)
    return report


class _Sweep:
    """One table's pass while it runs."""

    def __init__(
        self,
        store: JobStore,
        cluster: Cluster,
        policy: Policy,
        recorder: Recorder,
        *,
        report: TableReport,
        grace_sec: float,
        dry_run: bool,
        may_go_on: Callable[[], bool],
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._policy = policy
        self._recorder = recorder
        self._report = report
        self._grace_sec = grace_sec
        self._dry_run = dry_run
        self._may_go_on = may_go_on
        self._told = 0
        self._changed = 0
        self._locked_out = 0

    def run(self, survey: Survey | None) -> None:
        survey = survey or self._store.survey()
        self._report.counts["unleased"] = survey.unleased
        self._report.oldest_sec = survey.oldest_sec
        if survey.candidates == 0:
            return
        if self._braked(survey):
            return
        rulebook = self._judge_holders()
        for scan in Scan:
            if survey.count(scan):
                survey, rulebook = self._scan(scan, survey, rulebook)

    def _braked(self, survey: Survey) -> bool:
        if self._policy.brake.max_expired_share >= 1:
            return False
        sentence = share_brake(self._policy.brake, survey, self._store.processing_count())
        if sentence is None:
            return False
        self._report.braked = sentence
        self._report.counts["deferred"] = survey.candidates
        # A dry page under full hold names the rows that are being spared.
        for scan in Scan:
            room = LIST_AT_MOST - len(self._report.deferred_ids)
            if room and survey.count(scan):
                request = PageRequest(scan, survey.as_of, limit=room, deferred_detail=room, dry_run=True)
                page = self._store.reap(request, Rulebook(grace_sec=float("inf")))
                self._report.deferred_ids.extend(page.deferred)
        return True

    def _judge_holders(self) -> Rulebook:
        """Ask the second witness: after the rows were read, outside any transaction."""

        def holders() -> Sequence[str]:
            return self._store.holders(limit=self._policy.liveness.max_holders)

        return replace(self._cluster.rulebook(holders), grace_sec=self._grace_sec)

    def _scan(self, scan: Scan, survey: Survey, rulebook: Rulebook) -> tuple[Survey, Rulebook]:
        seen = 0
        size = self._policy.batch_size
        after: tuple[str | None, str | None] | None = None
        while self._room():
            if not self._may_go_on():
                return survey, rulebook
            request = self._request(scan, survey.as_of, size, after)
            try:
                if size > 1:
                    page = self._store.reap(request, rulebook)
                else:
                    row = self._store.peek(request)
                    if row is None:
                        break
                    alone = self._try_alone(row, request, rulebook)
                    if alone is None or alone.fresh:
                        after, seen, size = row.key, seen + 1, min(2, self._policy.batch_size)
                        continue
                    page = alone
            except (RowError, TransientError) as error:
                if not _worth_halving(error):
                    raise
                size = max(1, request.limit // 2)
                continue
            if not page.fresh:  # the evidence grew old: ask again and go on where we stand
                survey, rulebook = self._store.survey(), self._judge_holders()
                continue
            self._take_in(page)
            seen += page.rows
            after = page.last_key or after
            if page.rows < request.limit:
                if page.edge is None:
                    break
                # Others hold the missing rows; what lies behind them is still ours to look at.
                after = (page.edge, None)
            size = min(self._policy.batch_size, size * 2)
        self._scanned(survey.count(scan) - seen)
        return survey, rulebook

    def _scanned(self, missing: int) -> None:
        if self._room():
            self._report.counts["moved_on"] += max(0, missing)
        else:
            self._report.capped = True

    def _try_alone(self, row: NextRow, request: PageRequest, rulebook: Rulebook) -> Page | None:
        """Try one row alone; if it cannot be written, name it, so that it can be stepped over."""
        try:
            page = self._store.reap(replace(request, only=row.key[1]), rulebook)
        except (RowError, TransientError) as error:
            if not _worth_halving(error):
                raise
            self._locked_out = self._locked_out + 1 if isinstance(error, TransientError) else 0
            if self._locked_out >= LOCKED_OUT_AFTER:
                raise TableError(
                    f"{self._locked_out} jobs in a row could not be written: {error.message}; somebody holds"
                    " a lock on the table or its events (pg_locks shows who)",
                    code=error.code,
                ) from error
            self._report.counts["poisoned"] += 1
            if len(self._report.poisoned) < LIST_AT_MOST:
                poison = Poison(row.id, error.message)
                self._report.poisoned.append(poison)
                self._recorder.poisoned(self._report.name, poison)
            return None
        self._locked_out = 0
        if page.fresh:
            self._take_in(page)
        return page

    def _request(
        self, scan: Scan, as_of: str, size: int, after: tuple[str | None, str | None] | None
    ) -> PageRequest:
        # A batch is told either job by job or in sums: the first one is cut to what may be told singly.
        untold = LIST_AT_MOST - self._told
        return PageRequest(
            scan,
            as_of,
            limit=min(size, untold) if untold > 0 else size,
            after=after,
            cap=self._cap(),
            detailed=untold > 0,
            deferred_detail=LIST_AT_MOST - len(self._report.deferred_ids),
            dry_run=self._dry_run,
        )

    def _take_in(self, page: Page) -> None:
        report, changed = self._report, page.changed
        self._changed += changed
        self._told += len(page.changes)
        for change in page.changes:
            ids = report.failed_ids if change.outcome == Outcome.FAILED else report.requeued_ids
            ids.append(change.id)
        for group in page.groups:
            report.counts[group.outcome] += group.n
        for outcome in (Outcome.DEFERRED, Outcome.NOT_DUE):
            report.counts[outcome] += page.judged.get(outcome, 0)
        report.deferred_ids.extend(page.deferred)
        meant = page.judged.get(Outcome.REQUEUED, 0) + page.judged.get(Outcome.FAILED, 0)
        if self._room():
            report.counts["moved_on"] += max(0, meant - changed)
        self._recorder.page(report.name, page, dry_run=self._dry_run)

    def _cap(self) -> int | None:
        limit = self._store.spec.max_per_pass
        return None if limit is None else limit - self._changed

    def _room(self) -> bool:
        cap = self._cap()
        return cap is None or cap > 0


def _worth_halving(error: ReaperError) -> bool:
    """A row's own fault, or a conflict that may belong to one row's trigger: a smaller batch isolates it."""
    return isinstance(error, RowError) or error.code in ("lock_timeout", "conflict")
