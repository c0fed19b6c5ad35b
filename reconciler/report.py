"""What a pass reads and reports: pages, changes, the result of a table and of the whole.

Values like those in model.py, and as pure: nothing here imports anything but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Scan(StrEnum):
    """Which rows a batch looks at."""

    EXPIRED = "expired"  # leases that ran out
    STALE = "stale"  # rows without a lease whose last sign of life is old
    FAR = "far"  # leases too far ahead to be believed


@dataclass(frozen=True, slots=True)
class Survey:
    """What asks for attention in one table. `as_of` is Postgres' own time, as text: the evidence's age."""

    as_of: str
    expired: int = 0
    stale: int = 0
    far: int = 0
    unleased: int = 0
    oldest_sec: float = 0.0

    @property
    def candidates(self) -> int:
        return self.expired + self.stale + self.far

    def count(self, scan: Scan) -> int:
        return {Scan.EXPIRED: self.expired, Scan.STALE: self.stale, Scan.FAR: self.far}[scan]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who holds jobs, as far as the silent-fleet brake needs to know."""

    holders: frozenset[str] = frozenset()
    any_fresh_beat: bool = False


@dataclass(frozen=True, slots=True)
class PageRequest:
    """One batch: where it starts, how many rows it may look at and change, how much it should tell.

    `after` is the key (lease, id) behind which it starts; without an id, behind all rows of that lease.
    """

    scan: Scan
    as_of: str
    limit: int
    after: tuple[str | None, str | None] | None = None
    cap: int | None = None
    only: str | None = None
    detailed: bool = True
    deferred_detail: int = 0
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class NextRow:
    """Where a scan stands, by key, and the row that stands there."""

    key: tuple[str | None, str]
    id: object


@dataclass(frozen=True, slots=True)
class Change:
    """One job the reaper changed (or would change), as the log tells it."""

    id: object
    outcome: str
    reason: str
    event: str
    verdict: str
    locked_by: str | None
    stage: str | None
    attempt: int | None
    max_attempts: int
    backoff_sec: float | None
    fail_code: str | None
    overdue_sec: float | None
    pod: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Changed rows that share their metric labels and their time-to-recover bucket."""

    outcome: str
    reason: str
    stage: str | None
    bucket: int | None
    n: int
    overdue_sum: float


@dataclass(frozen=True, slots=True)
class HolderGroup:
    """Changed rows beyond the detailed ones, by who held them."""

    outcome: str
    reason: str
    locked_by: str | None
    n: int


@dataclass(frozen=True, slots=True)
class Page:
    """What one batch did. Either every changed job is in `changes`, or `holders` sums them up.

    `edge` is the lease up to which it looked, None when it looked to the end.
    """

    rows: int
    last_key: tuple[str | None, str] | None
    edge: str | None
    judged: Mapping[str, int]
    deferred: tuple[object, ...]
    fresh: bool
    changes: tuple[Change, ...]
    groups: tuple[Group, ...]
    holders: tuple[HolderGroup, ...]

    @property
    def changed(self) -> int:
        return sum(group.n for group in self.groups)


@dataclass(frozen=True, slots=True)
class Poison:
    """A row that could not be written, and what the database said about it."""

    id: object
    error: str


@dataclass(frozen=True, slots=True)
class TableFault:
    """Why a table was not (wholly) served."""

    code: str
    message: str


@dataclass(slots=True)
class TableReport:
    """The result of one table's pass: a value per table, never an exception (SPEC.md decision 12)."""

    name: str
    requeued_ids: list[object] = field(default_factory=list)
    failed_ids: list[object] = field(default_factory=list)
    deferred_ids: list[object] = field(default_factory=list)
    poisoned: list[Poison] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("requeued", "failed", "deferred", "moved_on", "not_due", "unleased", "poisoned"), 0
        )
    )
    error: TableFault | None = None
    braked: str | None = None
    capped: bool = False
    stopped: bool = False
    oldest_sec: float = 0.0
    scan_ms: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None and not self.counts["poisoned"]


@dataclass(slots=True)
class PassReport:
    """The result of one pass over all tables."""

    tables: dict[str, TableReport] = field(default_factory=dict)
    dry_run: bool = False
    skipped: str | None = None
    pass_ms: float = 0.0

    @property
    def ok(self) -> bool:
        return all(report.ok for report in self.tables.values())

    @property
    def stopped(self) -> bool:
        """Whether a table was left before it was done, because we were told to or lost the pass."""
        return any(report.stopped for report in self.tables.values())

    @property
    def exit_code(self) -> int:
        if not self.ok:
            return 1
        return 3 if any(report.braked for report in self.tables.values()) else 0
