"""Run the SDK's queries: compose them for a table, on any psycopg connection, sync or async.

A primitive is written once, as a generator that yields queries and gets rows back. Called with a
Connection it runs at once and returns its result; called with an AsyncConnection it returns an awaitable.
It follows the connection's own transaction: nothing here commits, so `finish_job` can share a
transaction with the app's own writes. With `autocommit` each call stands alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

import psycopg
from psycopg import errors as pg
from psycopg import sql
from psycopg.rows import tuple_row

from reconciler.errors import TableError
from reconciler.model import TableSpec
from reconciler.sql import query
from reconciler.worker.errors import ArgumentError

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Rows: TypeAlias = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Query:
    """One statement and its parameters; `table` is only for the error message."""

    table: str
    text: bytes
    params: dict[str, Any]


Steps: TypeAlias = Generator[Query, Rows, T]


class Primitive(Protocol[P, T_co]):
    """A function on a connection of either kind."""

    @overload
    def __call__(self, conn: psycopg.Connection[Any], /, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(
        self, conn: psycopg.AsyncConnection[Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T_co]: ...


def primitive(steps: Callable[P, Steps[T]]) -> Primitive[P, T]:
    """Make a generator of queries callable on a Connection and on an AsyncConnection."""

    @wraps(steps)
    def run(conn: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        drive = _drive_async if isinstance(conn, psycopg.AsyncConnection) else _drive
        return drive(conn, steps(*args, **kwargs))

    # help() and editors must show the call as it is made.
    signature = inspect.signature(steps)
    conn = inspect.Parameter("conn", inspect.Parameter.POSITIONAL_ONLY)
    cast(Any, run).__signature__ = signature.replace(parameters=[conn, *signature.parameters.values()])
    return cast(Primitive[P, T], run)


def _drive(conn: psycopg.Connection[Any], steps: Steps[T]) -> T:
    # Our own cursor: the app's connection may have any row or cursor factory.
    try:
        todo = next(steps)
        with psycopg.Cursor(conn, row_factory=tuple_row) as cursor:
            while True:
                try:
                    rows = cursor.execute(todo.text, todo.params).fetchall()
                except psycopg.Error as error:
                    _explain(error, todo)
                todo = steps.send(rows)
    except StopIteration as end:
        return cast(T, end.value)


async def _drive_async(conn: psycopg.AsyncConnection[Any], steps: Steps[T]) -> T:
    try:
        todo = next(steps)
        async with psycopg.AsyncCursor(conn, row_factory=tuple_row) as cursor:
            while True:
                try:
                    rows = await (await cursor.execute(todo.text, todo.params)).fetchall()
                except psycopg.Error as error:
                    _explain(error, todo)
                todo = steps.send(rows)
    except StopIteration as end:
        return cast(T, end.value)


def _explain(error: psycopg.Error, todo: Query) -> NoReturn:
    """Turn what the schema or an argument did wrong into a sentence; pass on everything else."""
    message = error.diag.message_primary or str(error)
    if isinstance(error, pg.UndefinedTable | pg.UndefinedColumn | pg.InsufficientPrivilege):
        raise TableError(
            f"table {todo.table}: {message}. `job-reaper migrate` adds what is missing; other names are "
            f"configured under tables.{todo.table}"
        ) from error
    if isinstance(error, psycopg.DataError):
        given = {key: todo.params[key] for key in ("id", "stage", "code", "reason") if key in todo.params}
        raise ArgumentError(f"table {todo.table}", given, f"the server says: {message}") from error
    raise error


@lru_cache(maxsize=256)
def compose(spec: TableSpec, name: str, **parts: str) -> bytes:
    """The named query for this table. `parts` name the fragments that fill its variable places."""
    names = dict(_names(spec))
    for part, fragment in parts.items():
        names[part] = query("worker", fragment).format(**names)
    return query("worker", name).format(**names).as_bytes(None)


@lru_cache(maxsize=64)
def _names(spec: TableSpec) -> tuple[tuple[str, sql.Composable], ...]:
    c, s, e = spec.columns, spec.statuses, spec.events
    raw: dict[str, sql.Composable] = {
        "table": _qualified(spec.schema, spec.table),
        "events": _qualified(e.schema, e.table),
        "event_job_id": sql.Identifier(e.job_id),
        "event_data": sql.Identifier(e.data),
        "id": sql.Identifier(c.id),
        "status": sql.Identifier(c.status),
        "locked_by": sql.Identifier(c.locked_by),
        "lease": sql.Identifier(c.lease_expires_at),
        "beat": sql.Identifier(c.last_heartbeat_at),
        "start": sql.Identifier(c.processing_started_at),
        "attempt": sql.Identifier(c.attempt_count),
        "refunded": sql.Identifier(c.attempts_refunded),
        "max_attempts": sql.Identifier(c.max_attempts),
        "fail_code": sql.Identifier(c.fail_code),
        "fail_reason": sql.Identifier(c.fail_reason),
        "stage": sql.Identifier(c.stage),
        "due": sql.Identifier(c.next_earliest_run_at),
        "expected_ms": sql.Identifier(c.expected_duration_ms),
        "queued": sql.Literal(s.queued),
        "processing": sql.Literal(s.processing),
        "done": sql.Literal(s.done),
        "failed": sql.Literal(s.failed),
    }
    # psycopg quotes a name but leaves its % to be read as a placeholder.
    names: dict[str, sql.Composable] = {
        name: sql.SQL(part.as_string(None).replace("%", "%%")) for name, part in raw.items()
    }
    for fragment in ("fence", "lease_sec", "new_lease_sec", "beat_at"):
        names[fragment] = query("worker", fragment).format(**names)
    for name, length in (("lease_at", names["lease_sec"]), ("batch_lease_at", sql.SQL("free.lease_sec"))):
        names[name] = query("worker", "lease_at").format(**names, length=length)
    for name, column in (("next_attempt", "attempt"), ("next_refunded", "refunded")):
        names[name] = query("worker", "counter").format(column=names[column])
    return tuple(names.items())


def _qualified(schema: str | None, table: str) -> sql.Identifier:
    return sql.Identifier(schema, table) if schema else sql.Identifier(table)
