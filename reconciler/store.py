"""PgStore: one job table in Postgres, behind the JobStore port. Runs named statements, turns rows into values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from psycopg import sql

from reconciler.database import Connection, Database
from reconciler.model import (
    Change,
    Fleet,
    Group,
    HolderGroup,
    Page,
    PageRequest,
    Policy,
    Rulebook,
    Survey,
    TableSpec,
)
from reconciler.shape import TableShape
from reconciler.statements import Statements, policy_parameters, rule_parameters

Counted = Callable[[Connection, str, Mapping[str, int]], None]
"""Adds a batch's counters inside the batch's transaction (state.py)."""


class PgStore:
    """The statements of one table, on one connection."""

    def __init__(
        self, database: Database, shape: TableShape, policy: Policy, *, count: Counted | None = None
    ) -> None:
        self.shape = shape
        self._database = database
        self._statements = Statements(shape)
        self._policy = policy
        self._parameters = policy_parameters(policy, shape)
        self._count = count

    @property
    def spec(self) -> TableSpec:
        return self.shape.spec

    def survey(self) -> Survey:
        row = self._one(self._statements.survey, {**self._parameters, "as_of": None})
        as_of, expired, oldest_sec, far, stale, unleased = row
        return Survey(
            as_of=as_of, expired=expired, stale=stale, far=far, unleased=unleased, oldest_sec=oldest_sec
        )

    def processing_count(self) -> int:
        count: int = self._one(self._statements.processing_count, {})[0]
        return count

    def fleet(self, *, enough: int, silent_sec: float) -> Fleet:
        holders, fresh = self._one(self._statements.fleet, {"enough": enough, "silent_sec": silent_sec})
        return Fleet(frozenset(holders), fresh)

    def reap(self, request: PageRequest, rulebook: Rulebook) -> Page:
        statement = self._statements.reap(
            request.scan, resume=request.after is not None, dry_run=request.dry_run
        )
        parameters = self._request_parameters(request) | rule_parameters(rulebook)

        def work(conn: Connection) -> Page:
            row = conn.execute(statement, parameters).fetchone()
            assert row is not None
            page = _page(row)
            if self._count is not None and page.changed and not request.dry_run:
                self._count(conn, self.spec.name, _counters(page))
            return page

        return self._database.run(work)

    def peek(self, request: PageRequest) -> tuple[tuple[str | None, str], object] | None:
        statement = self._statements.peek(request.scan, resume=request.after is not None)
        parameters = self._request_parameters(request)
        row = self._database.run(lambda conn: conn.execute(statement, parameters).fetchone())
        return None if row is None else ((row[0][0], row[0][1]), row[1])

    def _request_parameters(self, request: PageRequest) -> dict[str, Any]:
        after_lease, after_id = request.after or (None, None)
        return {
            **self._parameters,
            "as_of": request.as_of,
            "limit": request.limit,
            "after_lease": after_lease,
            "after_id": after_id,
            "cap": request.cap,
            "detail": request.detail,
            "deferred_detail": request.deferred_detail,
        }

    def _one(self, statement: sql.Composed, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        row = self._database.run(lambda conn: conn.execute(statement, parameters).fetchone())
        assert row is not None
        return row


def _page(row: tuple[Any, ...]) -> Page:
    rows, last_key, details, groups, holders, judged, deferred, fresh = row
    return Page(
        rows=rows,
        last_key=None if last_key is None else (last_key[0], last_key[1]),
        details=tuple(Change(**detail) for detail in details),
        groups=tuple(Group(**group) for group in groups),
        holders=tuple(HolderGroup(**group) for group in holders),
        judged=judged,
        deferred=tuple(deferred),
        fresh=fresh,
    )


def _counters(page: Page) -> dict[str, int]:
    """What this batch adds to the totals kept in Postgres, keyed outcome|stage|reason."""
    counts: dict[str, int] = {}
    for group in page.groups:
        key = f"{group.outcome}|{group.stage or ''}|{group.reason}"
        counts[key] = counts.get(key, 0) + group.n
    return counts
