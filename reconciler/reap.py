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
from reconciler.model import Outcome, Policy, Rulebook
from reconciler.plan import share_brake, silent_fleet_sentence
from reconciler.ports import Cluster, JobStore, Recorder
from reconciler.report import NextRow, Page, PageRequest, Poison, Scan, Survey, TableFault, TableReport

LIST_AT_MOST = 1000
"""Ids per list in a report, and jobs told one by one in the log (SPEC.md decision 14)."""

REFRESHES_AT_MOST = 3
"""Evidence that is old again before it was used, this often in a row: then the witness is too slow."""


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
        self._refreshes = 0
        self._cut = False

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
            if survey.count(scan) and not self._report.stopped:
                survey, rulebook = self._scan(scan, survey, rulebook)
        if self._grace_sec and self._report.counts["deferred"] and not self._changed:
            self._report.braked = silent_fleet_sentence(self._grace_sec)

    def _braked(self, survey: Survey) -> bool:
        if self._policy.brake.max_expired_share >= 1:
            return False
        # A dry page under full hold counts and names the rows that have truly expired: the survey's numbers
        # also hold rows that only the row rule can tell from healthy ones.
        expired, ids = 0, list[object]()
        for scan in Scan:
            if survey.count(scan):
                request = PageRequest(
                    scan,
                    survey.as_of,
                    limit=survey.count(scan),
                    deferred_detail=LIST_AT_MOST - len(ids),
                    dry_run=True,
                )
                page = self._store.reap(request, Rulebook(grace_sec=float("inf")))
                expired += page.judged.get(Outcome.DEFERRED, 0)
                ids.extend(page.deferred)
        sentence = share_brake(self._policy.brake, expired, self._store.processing_count())
        if sentence is None:
            return False
        self._report.braked = sentence
        self._report.counts["deferred"] = expired
        self._report.deferred_ids.extend(ids)
        return True

    def _judge_holders(self) -> Rulebook:
        """Ask the second witness: after the rows were read, outside any transaction."""

        def holders() -> Sequence[str]:
            return self._store.holders(limit=self._policy.liveness.max_holders)

        return replace(self._cluster.rulebook(holders), grace_sec=self._grace_sec)

    def _scan(self, scan: Scan, survey: Survey, rulebook: Rulebook) -> tuple[Survey, Rulebook]:
        seen = 0
        size = ceiling = self._policy.batch_size
        after: tuple[str | None, str | None] | None = None
        while self._room():
            if not self._may_go_on():
                self._report.stopped = True
                return survey, rulebook
            request = self._request(scan, survey.as_of, size, after)
            if size == 1:
                row = self._store.peek(request)
                if row is None:
                    break
                alone = self._try_alone(row, request, rulebook)
                if alone is None or alone.fresh:
                    # A row that was stepped over often has neighbours like it: grow only after a good one.
                    after, seen, size = row.key, seen + 1, 1 if alone is None else min(2, ceiling)
                else:
                    survey, rulebook = self._ask_again()
                continue
            try:
                page = self._store.reap(request, rulebook)
            except (RowError, TransientError) as error:
                if not _worth_halving(error):
                    raise
                size = max(1, request.limit // 2)
                if error.code == "statement_timeout":  # slow rows, not one odd row: do not run into it again
                    ceiling = size
                continue
            if not page.fresh:
                survey, rulebook = self._ask_again()
                continue
            self._take_in(page)
            seen += page.rows
            after = page.last_key or after
            if page.rows < request.limit:
                if page.edge is None:
                    break
                # Others hold the missing rows; what lies behind them is still ours to look at.
                after = (page.edge, None)
            size = min(ceiling, size * 2)
        self._scanned(survey.count(scan) - seen)
        return survey, rulebook

    def _ask_again(self) -> tuple[Survey, Rulebook]:
        """The evidence grew old before it was used: ask again and go on where we stand, but not for ever."""
        self._refreshes += 1
        if self._refreshes > REFRESHES_AT_MOST:
            raise TableError(
                "the evidence is older than two minutes before it can be used; nothing was changed on it."
                " Lower database.statementTimeoutMs, or look at what makes the survey or the cluster slow",
                code="evidence_too_old",
            )
        return self._store.survey(), self._judge_holders()

    def _scanned(self, missing: int) -> None:
        if self._room():
            self._report.counts["moved_on"] += max(0, missing)
        elif missing > 0 or self._cut:
            self._report.capped = True

    def _try_alone(self, row: NextRow, request: PageRequest, rulebook: Rulebook) -> Page | None:
        """Try one row alone; if it cannot be written, name it, so that it can be stepped over."""
        try:
            page = self._store.reap(replace(request, only=row.key[1]), rulebook)
        except (RowError, TransientError) as error:
            if not _worth_halving(error):
                raise
            if isinstance(error, TransientError):
                self._blame_the_table_if_locked(request, rulebook)
            self._report.counts["poisoned"] += 1
            if len(self._report.poisoned) < LIST_AT_MOST:
                poison = Poison(row.id, error.message)
                self._report.poisoned.append(poison)
                self._recorder.poisoned(self._report.name, poison)
            return None
        if page.fresh:
            self._take_in(page)
        return page

    def _blame_the_table_if_locked(self, request: PageRequest, rulebook: Rulebook) -> None:
        """A batch of no rows takes the table's own locks: if even that waits, no row is to blame."""
        try:
            self._store.reap(replace(request, limit=0), rulebook)
        except TransientError as error:
            raise TableError(
                f"{error.message}; somebody holds a lock on the table or its events (pg_locks shows who)",
                code=error.code,
            ) from error

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
        self._refreshes = 0
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
        else:
            self._cut = meant > changed
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
