"""Bring a database to the schema job-reaper needs, without stopping the app that lives in it.

Read the catalogue, plan what is missing, run the first statement, and begin again, until nothing is
missing. So a run is idempotent, and one that was killed anywhere is continued by the next. The files are
migrations/*.sql; each says which lock it takes and why it is safe. docs/how-to/migrate.md is the manual.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from reconciler.database import translate
from reconciler.errors import MigrationError
from reconciler.migrate_catalog import Catalog, Connection, Server, read_catalog
from reconciler.migrate_files import migrations
from reconciler.migrate_indexes import DROP, Step
from reconciler.migrate_plan import CHOICE, Heartbeats, Plan, make_plan
from reconciler.migrate_session import (
    Patience,
    Retries,
    Say,
    alone,
    old_transactions,
    same_backend,
    session,
)
from reconciler.model import TableSpec
from reconciler.shape import qualified
from reconciler.sql import escaped, query

__all__ = ["DEFAULT_TABLES", "Heartbeats", "MigrationReport", "Patience", "migrate"]

DEFAULT_TABLES = (TableSpec("jobs", "jobs"), TableSpec("asr_jobs", "asr_jobs"))
_NOT_NOW = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """What a run did. A dry run fills `planned` (the steps) and `sql` (what would be sent) instead."""

    applied: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    planned: tuple[str, ...] = ()
    sql: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    heartbeats: tuple[tuple[str, Heartbeats], ...] = ()


def _silence(_: str) -> None:
    pass


def migrate(
    dsn: str | None,
    specs: Sequence[TableSpec] = DEFAULT_TABLES,
    *,
    default_max_attempts: int = 3,
    state_schema: str | None = None,
    state_table: str = "reaper_state",
    heartbeats: Heartbeats | None = None,
    dry_run: bool = False,
    say: Say = _silence,
    patience: Patience | None = None,
) -> MigrationReport:
    """Apply what is missing, or say what would be applied.

    `heartbeats=None` keeps the index set each table has. Raises MigrationError when something stands in
    the way (all of it at once, before anything is changed) and DatabaseError when there is no database.
    """
    waiting = patience or Patience()
    with session(dsn, read_only=dry_run) as (conn, server):

        def look() -> tuple[Catalog, Plan]:
            catalog = read_catalog(conn, server, specs, state_schema, state_table)
            return catalog, make_plan(catalog, heartbeats, default_max_attempts)

        try:
            if dry_run:
                _, plan = look()
                _refuse(plan)
                return _report(plan, plan, sql=_script(plan, waiting))
            with alone(conn, waiting, say):
                return _Run(conn, server, look, waiting, say).to_the_end()
        except psycopg.Error as error:
            raise translate(error) from error


class _Run:
    """One run under the lock."""

    def __init__(
        self,
        conn: Connection,
        server: Server,
        look: Callable[[], tuple[Catalog, Plan]],
        patience: Patience,
        say: Say,
    ) -> None:
        self._conn = conn
        self._server = server
        self._look = look
        self._patience = patience
        self._retries = Retries(patience, say)
        self._say = say
        self._bookkeeping: Any = None

    def to_the_end(self) -> MigrationReport:
        first: Plan | None = None
        applied: dict[str, str] = {}
        while True:
            same_backend(self._conn, self._server.pid)
            try:
                catalog, plan = self._look()
            except _NOT_NOW as error:
                self._retries.pause(self._conn, "read the catalogue", error)
                continue
            _refuse(plan)
            first = first or plan
            self._bookkeeping = qualified(catalog.bookkeeping.schema, catalog.bookkeeping.name)
            if catalog.bookkeeping.exists:
                self._remember(catalog, plan)
            if not plan.steps:
                return _report(first, plan, applied=tuple(applied.values()))
            step = plan.steps[0]
            if step.sql in applied and step.migration != DROP:
                raise MigrationError(
                    f"{step.title} ran, but the catalogue does not show it; did another session undo it?"
                    " Run migrate again, with --dry-run first",
                    code="no_effect",
                )
            try:
                self._run(step)
            except _NOT_NOW as error:
                # Look again before the next try: CONCURRENTLY may have left an invalid index behind.
                self._retries.pause(self._conn, step.title, error)
            else:
                applied[step.sql] = step.title

    def _remember(self, catalog: Catalog, plan: Plan) -> None:
        """Note what is there and which set was chosen; the choice first: a killed switch goes on."""
        for target, choice in plan.choices.items():
            record = catalog.records.get((CHOICE, target))
            if record is None or record.detail.get("set") != choice:
                values = {
                    "step": CHOICE,
                    "target": target,
                    "checksum": "",
                    "detail": json.dumps({"set": choice}),
                }
                self._book("record", values)
        for name, target in plan.done:
            if (name, target) not in catalog.records:
                self._book("record", _line(name, target, {}))

    def _run(self, step: Step) -> None:
        self._say(step.title)
        try:
            self._warn_of_waiting(step)
            self._attempt(step)
        except _NOT_NOW:
            raise
        except psycopg.Error as error:
            if self._conn.closed or self._conn.broken:
                raise MigrationError(
                    f"{step.title}: the connection was lost; run migrate again, it goes on from here",
                    code="connection_lost",
                ) from error
            raise MigrationError(
                f"{step.title} ({step.migration}.sql) failed: {translate(error).message}. The steps before it"
                " are kept; repair this and run migrate again",
                code="statement",
            ) from error

    def _warn_of_waiting(self, step: Step) -> None:
        oldest = old_transactions(self._conn)[:1] if step.concurrent else []
        for row in oldest:
            self._say(
                f"{step.title}: waits for older transactions, the oldest is pid {row['pid']}"
                f" ({row['application_name']}), open for {row['age_sec']} s"
            )

    def _attempt(self, step: Step) -> None:
        if step.concurrent:
            self._limit("SET lock_timeout = {}", self._patience.concurrent_timeout_ms)
            try:
                self._conn.execute(step.sql.encode())
            finally:
                if not self._conn.broken:
                    self._limit("SET lock_timeout = {}", self._patience.lock_timeout_ms)
            return
        with self._conn.transaction():
            self._limit("SET LOCAL lock_timeout = {}", self._patience.lock_timeout_ms)
            self._conn.execute(step.sql.encode())
            if step.detail is not None:
                self._book("record", _line(step.migration, step.target, step.detail))
            if step.forgets:
                self._book("forget", {"step": step.migration, "target": step.target})

    def _limit(self, text: str, milliseconds: int) -> None:
        self._conn.execute(text.format(int(milliseconds)).encode())

    def _book(self, name: str, values: Mapping[str, Any]) -> None:
        self._conn.execute(query("migrate", name).format(bookkeeping=escaped(self._bookkeeping)), values)


def _line(name: str, target: str, detail: Mapping[str, Any]) -> dict[str, Any]:
    checksum = migrations()[name].checksum
    return {"step": name, "target": target, "checksum": checksum, "detail": json.dumps(detail)}


def _script(plan: Plan, patience: Patience) -> tuple[str, ...]:
    """What a run would send, in order: pasteable into psql, as its own sentence (CONCURRENTLY needs that)."""
    script: list[str] = []
    limit = None
    for step in plan.steps:
        wanted = patience.concurrent_timeout_ms if step.concurrent else patience.lock_timeout_ms
        if wanted != limit:
            script.append(f"SET lock_timeout = {wanted};")
            limit = wanted
        script.append(f"{step.sql};")
    return ("SET statement_timeout = 0;", *script) if script else ()


def _refuse(plan: Plan) -> None:
    if plan.problems:
        lines = "\n".join(f"  - {problem}" for problem in plan.problems)
        raise MigrationError(f"the migration cannot go on:\n{lines}", code="refused")


def _report(
    first: Plan, last: Plan, *, applied: tuple[str, ...] = (), sql: tuple[str, ...] = ()
) -> MigrationReport:
    return MigrationReport(
        applied=applied,
        skipped=tuple((f"{name} {target}", reason) for (name, target), reason in first.done.items()),
        planned=tuple(step.title for step in first.steps) if sql else (),
        sql=sql,
        warnings=tuple(last.warnings),
        heartbeats=tuple(last.choices.items()),
    )
