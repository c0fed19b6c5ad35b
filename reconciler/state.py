"""The reaper's memory in Postgres (`reaper_state`): who runs the pass, when one succeeded, what was counted.

None of it carries correctness. Where the table is missing or not writable the pass runs all the same,
with its events, and says once what it cannot keep.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from reconciler.database import CONFLICT_CODES, Connection, Database
from reconciler.errors import DatabaseError, ReaperError
from reconciler.shape import qualified
from reconciler.sql import escaped, query

TTL_SEC = 45.0
"""How long the pass is ours without a renewal: shorter than a CronJob's minute, so that a reaper that was
killed costs nobody a pass. A batch that outlasts it may see a second reaper begin: harmless."""

COUNTED = "counters:"


def our_name() -> str:
    """Who we are in `reaper_state.holder`: read by people, so host and process; and no namesake."""
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class Taken:
    """The pass is ours. `resumed_age_sec`: how long ago we came back from a gap, if there was one."""

    resumed_age_sec: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody else runs the pass."""

    holder: str
    for_sec: float


@dataclass(frozen=True, slots=True)
class Totals:
    """What was counted since the table was made: (table, outcome, stage, reason) -> n."""

    counts: Mapping[tuple[str, str, str, str], int] = field(default_factory=dict)
    last_success: float | None = None


class PassState:
    """One scope of `reaper_state`: the tables this reaper serves, in this database."""

    def __init__(
        self, database: Database, schema: str | None, table: str, tables: Sequence[str], holder: str
    ) -> None:
        self._database = database
        self._name = qualified(schema, table)
        self._tables = tuple(tables)
        self._scope = "pass:" + ",".join(sorted(tables))
        self._holder = holder
        self.usable = False
        self.counting = False
        self.trouble: str | None = None

    @property
    def table(self) -> str:
        return self._name.as_string(None)

    def check(self) -> bool:
        """Whether there is a table to remember in. Asked at every pass: a migration may have made it."""
        row = self._database.run(
            lambda conn: conn.execute(query("state", "usable"), {"state": self.table}).fetchone()
        )
        self.usable = self.counting = bool(row and row[0])
        self.trouble = None if self.usable else "missing, or not ours to read and write"
        return self.usable

    def take(self, *, gap_sec: float) -> Taken | Held:
        """Take the pass, or say who has it."""
        if not self.usable:
            return Taken()
        try:
            row = self._one("take", ttl_sec=TTL_SEC, gap_sec=gap_sec)
            if row is not None:
                return Taken(row[0])
            other = self._one("who")
        except ReaperError as error:
            self._do_without(error)
            return Taken()
        return Held(other[0], other[1]) if other else Taken()

    def keep(self) -> bool:
        """Renew; False when another reaper has taken the pass over."""
        if not self.usable:
            return True
        try:
            return self._one("keep", ttl_sec=TTL_SEC) is not None
        except ReaperError as error:
            self._do_without(error)
            return True

    def give_back(self, *, success: bool) -> None:
        if self.usable:
            try:
                self._one("give_back", success=success)
            except ReaperError as error:
                self._do_without(error)

    def _do_without(self, error: ReaperError) -> None:
        """Our own table is the trouble: go on without it. A database that is away is everybody's trouble."""
        if isinstance(error, DatabaseError) and error.code not in CONFLICT_CODES:
            raise error
        self.usable = self.counting = False
        self.trouble = error.message

    def count(self, conn: Connection, table: str, counts: Mapping[str, int]) -> None:
        """Add to the totals inside the batch's transaction; a failure here costs the count, not the batch."""
        if not self.counting:
            return
        try:
            with conn.transaction():  # a savepoint: what fails here is rolled back alone
                conn.execute(
                    self._query("count"), {"scope": COUNTED + table, "counts": json.dumps(dict(counts))}
                )
        except psycopg.Error:
            if conn.broken or conn.closed:
                raise
            self.counting = False  # until the next pass; the pass line says "counters_kept": false

    def totals(self) -> Totals:
        if not self.usable:
            return Totals()
        scopes = [self._scope, *(COUNTED + table for table in self._tables)]
        rows = self._database.run(
            lambda conn: conn.execute(self._query("totals"), {"scopes": scopes}).fetchall()
        )
        counts: dict[tuple[str, str, str, str], int] = {}
        last_success = None
        for scope, counters, success in rows:
            if scope == self._scope:
                last_success = success
                continue
            for key, n in counters.items():
                outcome, stage, reason = _parts(key)
                counts[scope.removeprefix(COUNTED), outcome, stage, reason] = int(n)
        return Totals(counts, last_success)

    def _one(self, name: str, **parameters: object) -> tuple[Any, ...] | None:
        everything = {"scope": self._scope, "holder": self._holder, **parameters}
        return self._database.run(
            lambda conn: conn.execute(self._query(name), everything).fetchone(), conflict_tries=2
        )

    def _query(self, name: str) -> sql.Composed:
        return query("state", name).format(state=escaped(self._name))


def _parts(key: str) -> tuple[str, str, str]:
    """outcome|stage|reason; a stage may itself hold a bar, the other two never do."""
    outcome, rest = key.split("|", 1)
    stage, reason = rest.rsplit("|", 1)
    return outcome, stage, reason
