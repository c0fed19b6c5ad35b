"""The narrow openings between the pass and the world. Adapters implement them; the pass knows no other way.

Few methods each. What a method cannot do it says with an error from errors.py, never with an empty answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from reconciler.model import Rulebook, TableSpec
from reconciler.report import Fleet, NextRow, Page, PageRequest, Poison, Survey, TableReport


class JobStore(Protocol):
    """One job table in Postgres."""

    @property
    def spec(self) -> TableSpec: ...

    def survey(self) -> Survey:
        """Count what asks for attention. Reads only, locks nothing."""
        ...

    def processing_count(self) -> int:
        """How many rows are being processed at all: the whole that a share needs."""
        ...

    def holders(self, *, limit: int) -> Sequence[str]:
        """The distinct holders of rows that ask for attention, those waiting longest first."""
        ...

    def fleet(self, *, enough: int, silent_sec: float) -> Fleet:
        """Some holders, and whether any of them has beaten lately."""
        ...

    def reap(self, request: PageRequest, rulebook: Rulebook) -> Page:
        """Judge and change one batch in one short transaction; raises RowError when a row refuses."""
        ...

    def peek(self, request: PageRequest) -> NextRow | None:
        """The next row of a scan that nobody else holds, without judging it."""
        ...


class Cluster(Protocol):
    """The second witness. `holders` is only called when the answer depends on who holds the rows."""

    def rulebook(self, holders: Callable[[], Sequence[str]]) -> Rulebook: ...


class NullCluster:
    """No second witness: every holder is UNKNOWN and the lease alone decides."""

    def rulebook(self, holders: Callable[[], Sequence[str]]) -> Rulebook:
        return Rulebook()


class Recorder(Protocol):
    """Where a pass tells what it did: log lines, metrics, totals."""

    def page(self, table: str, page: Page, *, dry_run: bool) -> None: ...

    def poisoned(self, table: str, poison: Poison) -> None: ...

    def crashed(self, table: str, error: Exception) -> None: ...

    def table(self, report: TableReport, *, dry_run: bool) -> None: ...
