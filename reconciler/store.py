"""PgStore: one job table behind the JobStore port. Runs named statements, turns rows into values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from psycopg import sql

from reconciler.database import Connection, Database
from reconciler.model import Policy, Rulebook, TableSpec
from reconciler.report import Change, Fleet, Group, HolderGroup, NextRow, Page, PageRequest, Survey
from reconciler.shape import TableShape
from reconciler.statements import (
    RECOVERY_BUCKETS_SEC,
    Statements,
    asks_holders,
    policy_parameters,
    rule_parameters,
)

ALONE_LOCK_TIMEOUT_MS = 200

Counted = Callable[[Connection, str, Mapping[str, int]], None]
"""Adds a batch's counters inside the batch's transaction (state.py)."""

OTHER_STAGE = "other"


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

    def holders(self, *, limit: int) -> Sequence[str]:
        statement = self._statements.holders
        parameters = {**self._parameters, "as_of": None, "limit": limit}
        rows = self._database.run(lambda conn: conn.execute(statement, parameters).fetchall())
        return [row[0] for row in rows]

    def fleet(self, *, enough: int, silent_sec: float) -> Fleet:
        holders, fresh = self._one(self._statements.fleet, {"enough": enough, "silent_sec": silent_sec})
        return Fleet(frozenset(holders), fresh)

    def reap(self, request: PageRequest, rulebook: Rulebook) -> Page:
        statement = self._statements.reap(
            request.scan,
            resume=request.after is not None,
            past_lease=_past_lease(request),
            only=request.only is not None,
            per_holder=asks_holders(rulebook),
            detailed=request.detailed,
            dry_run=request.dry_run,
        )
        parameters = self._request_parameters(request) | rule_parameters(rulebook)

        def work(conn: Connection) -> Page:
            row = conn.execute(statement, parameters).fetchone()
            assert row is not None
            page = _page(row)
            if self._count is not None and page.changed and not request.dry_run:
                self._count(conn, self.spec.name, _counters(page, self._policy.sla.factors))
            return page

        # A conflict inside a batch may be one row's own: the caller halves at once. Alone it gets its tries,
        # but nobody waits long for a lock: many rows may hang on the same one.
        if request.only is None:
            return self._database.run(work, conflict_tries=1, lock_tries=1)
        return self._database.run(work, lock_tries=1, lock_timeout_ms=ALONE_LOCK_TIMEOUT_MS)

    def peek(self, request: PageRequest) -> NextRow | None:
        statement = self._statements.peek(
            request.scan,
            resume=request.after is not None,
            past_lease=_past_lease(request),
            dry_run=request.dry_run,
        )
        parameters = self._request_parameters(request)
        row = self._database.run(lambda conn: conn.execute(statement, parameters).fetchone())
        return None if row is None else NextRow(key=(row[0][0], row[0][1]), id=row[1])

    def _request_parameters(self, request: PageRequest) -> dict[str, Any]:
        after_lease, after_id = request.after or (None, None)
        return {
            **self._parameters,
            "as_of": request.as_of,
            "limit": request.limit,
            "after_lease": after_lease,
            "after_id": after_id,
            "only_id": request.only,
            "cap": request.cap,
            "deferred_detail": request.deferred_detail,
        }

    def _one(self, statement: sql.Composed, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        row = self._database.run(lambda conn: conn.execute(statement, parameters).fetchone())
        assert row is not None
        return row


def _past_lease(request: PageRequest) -> bool:
    return request.after is not None and request.after[1] is None


def _page(row: tuple[Any, ...]) -> Page:
    last_key, edge, judged, deferred, fresh, each, grouped = row
    changes = tuple(Change(*fields) for fields in each or ())
    groups, holders = _from_sql(grouped or []) if each is None else (_from_changes(changes), ())
    return Page(
        rows=sum((judged or {}).values()),
        last_key=None if last_key is None else (last_key[0], last_key[1]),
        edge=edge,
        judged=judged or {},
        deferred=tuple(deferred or ()),
        fresh=fresh,
        changes=changes,
        groups=groups,
        holders=holders,
    )


def _from_changes(changes: tuple[Change, ...]) -> tuple[Group, ...]:
    sums: dict[tuple[str, str, str | None, int | None], tuple[int, float]] = {}
    for change in changes:
        late = change.overdue_sec
        bucket = None if late is None else bisect_right(RECOVERY_BUCKETS_SEC, late)
        key = (change.outcome, change.reason, change.stage, bucket)
        n, total = sums.get(key, (0, 0.0))
        sums[key] = (n + 1, total + (late or 0.0))
    return tuple(Group(*key, n, total) for key, (n, total) in sums.items())


def _from_sql(rows: list[list[Any]]) -> tuple[tuple[Group, ...], tuple[HolderGroup, ...]]:
    """Two groupings come in one list: the one by holder has no overdue bucket of its own."""
    groups, holders = [], []
    for outcome, reason, stage, bucket, locked_by, n, total, by_holder in rows:
        if by_holder:
            holders.append(HolderGroup(outcome, reason, locked_by, n))
        else:
            groups.append(Group(outcome, reason, stage, bucket, n, total or 0.0))
    return tuple(groups), tuple(holders)


def _counters(page: Page, stages: Container[str]) -> dict[str, int]:
    """What this batch adds to the totals kept in Postgres, keyed outcome|stage|reason.

    Stages nobody configured are counted as one: every batch rewrites these counters, so they must stay few.
    """
    counts: dict[str, int] = {}
    for group in page.groups:
        stage = group.stage or ""
        if stage and stage not in stages:
            stage = OTHER_STAGE
        key = f"{group.outcome}|{stage}|{group.reason}"
        counts[key] = counts.get(key, 0) + group.n
    return counts
