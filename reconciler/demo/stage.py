"""The database the play is set in: a private Postgres, or a schema of its own in one that was named.

A database is only ever used when it was named on the command line. DATABASE_URL is not enough: a play that
kills workers has no business in the database that happens to be configured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from reconciler.demo.postgres import EmbeddedPostgres
from reconciler.demo.scenario import Task
from reconciler.errors import DatabaseError, UsageError
from reconciler.migrate import migrate
from reconciler.sql import query

SCHEMA = "job_reaper_demo"


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the play takes place, what to call it, and how to remove it when it is kept."""

    dsn: str
    what: str
    how_to_remove: str


@contextmanager
def private_stage(*, keep: bool) -> Iterator[Stage]:
    """A Postgres of our own. With `keep` it goes on running when we are done, and only then."""
    with EmbeddedPostgres() as server:
        source = "of this machine" if server.installation.source == "system" else "from the wheel"
        remove = f"kill -INT {server.pid} && rm -rf {server.base}"
        yield Stage(server.dsn, f"Postgres {server.installation.major} {source}", remove)
        if keep:
            server.detach()


@contextmanager
def borrowed_stage(dsn: str, *, keep: bool) -> Iterator[Stage]:
    """A schema of our own in a database that was named. Nothing outside of it is touched."""
    try:
        own = conninfo_to_dict(dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(sql.SQL("create schema {}").format(sql.Identifier(SCHEMA)))
            what = f"Postgres {conn.info.server_version // 10000}, schema {SCHEMA} of {conn.info.dbname}"
    except psycopg.errors.DuplicateSchema:
        raise UsageError(
            f"--dsn: the database already has a schema {SCHEMA}, perhaps of an earlier demo: "
            f"if so, remove it with  drop schema {SCHEMA} cascade",
            code="demo_schema",
        ) from None
    except psycopg.Error as error:
        raise DatabaseError(f"--dsn: {error}".strip(), code="demo_dsn") from error
    options = f"{own.get('options') or ''} -c search_path={SCHEMA}".strip()
    remove = sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(SCHEMA))
    done = False
    try:
        yield Stage(make_conninfo(dsn, options=options), what, f"drop schema {SCHEMA} cascade")
        done = True
    finally:
        if not (keep and done):
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute(remove)


def furnish(dsn: str, tasks: Sequence[Task]) -> None:
    """An app's own tables with its jobs in them, then our migrations, as on a first day in production."""
    with psycopg.connect(dsn) as conn:
        for statement in query("demo", "app_tables").as_string().split(";"):
            if statement.strip():
                conn.execute(statement.encode())
        for task in tasks:
            values = {
                "id": task.id,
                "title": task.title,
                "stage": task.stage,
                "expected_ms": task.expected_ms,
                "work_sec": task.work_sec,
                "fate": task.fate.value,
            }
            conn.execute(query("demo", "add_task").format(table=sql.Identifier(task.table)), values)
    migrate(dsn)
