"""What a pass tells: a line per changed job (the first 1,000), then one per holder and reason, one per pass.

The events in Postgres are the full record; these lines are for the eye at 3 a.m.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import TYPE_CHECKING

from reconciler.logs import LOGGER, say
from reconciler.report import Change, Page, PassReport, Poison, TableReport

if TYPE_CHECKING:
    from reconciler.metrics import Metrics

HOLDERS_AT_MOST = 10_000
"""Distinct (holder, reason) sums kept in memory; what comes after is summed under one name."""

OTHERS = "(other holders)"

# What a line tells of a change: the outcome is its message. Not asdict(), which copies every value deeply.
_TOLD = tuple(field.name for field in dataclasses.fields(Change) if field.name != "outcome")

_WORDS = {
    ("requeued", False): "job requeued",
    ("failed", False): "job failed",
    ("requeued", True): "job would be requeued",
    ("failed", True): "job would be failed",
}


class LineBudget:
    """How many jobs may still be told one by one in this pass; shared by the tables of a pass."""

    def __init__(self, lines: int = 1000) -> None:
        self._left = lines
        self._lock = threading.Lock()

    def take(self, wanted: int) -> int:
        with self._lock:
            given = min(wanted, self._left)
            self._left -= given
            return given


class PassRecorder:
    """The Recorder of one pass: log lines, and metrics where a process lives long enough to have them."""

    def __init__(self, metrics: Metrics | None = None, lines: LineBudget | None = None) -> None:
        self._metrics = metrics
        self._lines = lines or LineBudget()
        self._sums: dict[tuple[str, str, str, str | None], int] = {}

    def page(self, table: str, page: Page, *, dry_run: bool) -> None:
        told = self._lines.take(len(page.changes))
        for change in page.changes[:told]:
            line = {"table": table, **{name: getattr(change, name) for name in _TOLD}}
            say(_WORDS[change.outcome, dry_run], fields=line)
        for change in page.changes[told:]:
            self._sum_up(table, change.outcome, change.reason, change.locked_by, 1)
        for group in page.holders:
            self._sum_up(table, group.outcome, group.reason, group.locked_by, group.n)
        if self._metrics is not None and not dry_run:
            self._metrics.page(table, page)

    def _sum_up(self, table: str, outcome: str, reason: str, holder: str | None, jobs: int) -> None:
        key = (table, outcome, reason, holder)
        if key not in self._sums and len(self._sums) >= HOLDERS_AT_MOST:
            key = (table, outcome, reason, OTHERS)
        self._sums[key] = self._sums.get(key, 0) + jobs

    def poisoned(self, table: str, poison: Poison) -> None:
        say(
            "job cannot be written, stepped over",
            level=logging.ERROR,
            fields={"table": table, "id": poison.id, "error": poison.error},
        )

    def crashed(self, table: str, error: Exception) -> None:
        LOGGER.error(
            "table crashed: this is a bug in job-reaper",
            exc_info=error,
            extra={"fields": {"table": table}},
        )

    def table(self, report: TableReport, *, dry_run: bool) -> None:
        for (table, outcome, reason, holder), n in list(self._sums.items()):
            if table == report.name:
                fields = {"table": table, "reason": reason, "locked_by": holder, "jobs": n}
                say(_WORDS[outcome, dry_run].replace("job", "jobs", 1), fields=fields)
                del self._sums[table, outcome, reason, holder]
        if report.braked:
            say(
                "brake: table left unchanged",
                level=logging.WARNING,
                fields={"table": report.name, "why": report.braked},
            )
        if report.counts["unleased"]:
            say(
                "jobs without any stamp are never touched; look at them yourself",
                level=logging.WARNING,
                fields={"table": report.name, "jobs": report.counts["unleased"]},
            )
        if report.error is not None:
            say(
                "table not served",
                level=logging.ERROR,
                fields={"table": report.name, "code": report.error.code, "error": report.error.message},
            )
        if self._metrics is not None:
            self._metrics.table(report)


def pass_line(report: PassReport, *, counters_kept: bool, brake: str | None = None) -> None:
    """The one line per pass."""
    level = logging.INFO if report.ok else logging.ERROR
    if report.skipped:
        say("pass skipped", fields={"why": report.skipped})
        return
    say(
        "pass done" if report.ok else "pass done with errors",
        level=level,
        fields={
            "pass_ms": round(report.pass_ms, 1),
            "dry_run": report.dry_run,
            "counters_kept": counters_kept,
            **({"brake": brake} if brake else {}),
            "tables": {
                name: {**table.counts, **({"capped": True} if table.capped else {})}
                for name, table in report.tables.items()
            },
        },
    )
