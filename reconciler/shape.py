"""What a job table looks like in this database, checked before anything is judged.

The configuration names columns; the catalogue knows their types. A pass that would fail half-way on a
missing column, a timestamp without a time zone or a missing right is refused here, with the sentence
that repairs it, and the other tables are still served.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import psycopg
from psycopg import sql

from reconciler.errors import TableError
from reconciler.model import Columns, EventsSpec, TableSpec
from reconciler.sql import query, trusted

STAMPS = ("lease_expires_at", "last_heartbeat_at", "processing_started_at", "next_earliest_run_at")
COUNTERS = {"smallint": 32_767, "integer": 2_147_483_647, "bigint": 9_223_372_036_854_775_807}
OPTIONAL = frozenset({"max_attempts"})
WRITTEN = (
    "status",
    "locked_by",
    *STAMPS,
    "attempt_count",
    "fail_code",
    "fail_reason",
)
_TABLE_KINDS = ("r", "p")

Row = tuple[Any, ...]
Connection = psycopg.Connection[Row]


@dataclass(frozen=True, slots=True)
class Column:
    """One column as the catalogue tells it. `base` is the type below a domain."""

    name: str
    type: str
    base: str
    is_enum: bool
    required: bool
    schema: str
    in_key: bool


@dataclass(frozen=True, slots=True)
class TableShape:
    """A table that passed every check: the spec plus the types the statements cast to."""

    spec: TableSpec
    id_type: str
    status_type: str
    attempt_type: str
    attempt_ceiling: int
    has_max_attempts: bool
    job_id_type: str
    data_type: str
    rewrites_key: bool


def read_shape(conn: Connection, spec: TableSpec) -> TableShape:
    """Describe one table or raise the TableError that says what to do about it."""
    columns = _columns(conn, spec.schema, spec.table, spec.name, "tables")
    names = {field.name: getattr(spec.columns, field.name) for field in fields(Columns)}
    missing = [name for role, name in names.items() if name not in columns and role not in OPTIONAL]
    if missing:
        raise TableError(
            f"table {_say(spec.schema, spec.table)} has no column {_list(missing)}; run `job-reaper migrate`"
            f" to add what is missing, or map your own names under tables.{spec.name}.columns",
            code="missing_column",
        )
    _check_types(spec, {role: columns[name] for role, name in names.items() if name in columns})
    events = _columns(conn, spec.events.schema, spec.events.table, spec.name, f"tables.{spec.name}.events")
    _check_events(spec, events)
    # From here on with its schema: a bare name could be taken for a step of our own statements.
    spec = replace(
        spec,
        schema=columns[spec.columns.id].schema,
        events=replace(spec.events, schema=events[spec.events.job_id].schema),
    )
    shape = TableShape(
        spec=spec,
        id_type=columns[spec.columns.id].type,
        status_type=_written_as(columns[spec.columns.status]),
        attempt_type=columns[spec.columns.attempt_count].type,
        attempt_ceiling=COUNTERS[columns[spec.columns.attempt_count].base],
        has_max_attempts=spec.columns.max_attempts in columns,
        job_id_type=_written_as(events[spec.events.job_id]),
        data_type=_written_as(events[spec.events.data]),
        rewrites_key=any(columns[getattr(spec.columns, role)].in_key for role in WRITTEN),
    )
    _check_rights(conn, spec, [name for name in names.values() if name in columns])
    _check_cast(conn, shape)
    _check_words(conn, shape)
    return shape


def qualified(schema: str | None, table: str) -> sql.Identifier:
    """A table's name, quoted by the driver."""
    return sql.Identifier(schema, table) if schema else sql.Identifier(table)


def type_name(name: str) -> sql.SQL:
    """A type as format_type() printed it: the catalogue has quoted it already."""
    return trusted(name)


def _columns(conn: Connection, schema: str | None, table: str, name: str, key: str) -> dict[str, Column]:
    regclass = qualified(schema, table).as_string(conn)
    rows = conn.execute(query("describe", "columns"), {"table": regclass}).fetchall()
    if not rows:
        raise TableError(
            f"there is no table {_say(schema, table)} in this database; run `job-reaper migrate` to create"
            f" it, or correct {key} (a schema outside the search_path must be named)",
            code="missing_table",
        )
    kind = rows[0][0]
    if kind not in _TABLE_KINDS:
        raise TableError(
            f"{_say(schema, table)} is not a table that rows can be locked in (relkind {kind!r});"
            f" name the table below it under {key}",
            code="not_a_table",
        )
    return {
        row[1]: Column(
            name=row[1],
            type=row[2],
            base=row[3],
            is_enum=row[4] == "e",
            required=row[5] and not row[6],
            schema=row[7],
            in_key=row[8],
        )
        for row in rows
    }


def _check_types(spec: TableSpec, columns: dict[str, Column]) -> None:
    table = _say(spec.schema, spec.table)
    wrong: list[str] = []
    for role in STAMPS:
        column = columns[role]
        if column.base != "timestamp with time zone":
            wrong.append(
                f"{column.name} is {column.type}, but only timestamptz says which instant is meant"
                f" (ALTER TABLE {table} ALTER {column.name} TYPE timestamptz USING {column.name}"
                " AT TIME ZONE 'UTC', if it was written in UTC)"
            )
    for role in ("attempt_count", "attempts_refunded", "max_attempts", "expected_duration_ms"):
        if role in columns and columns[role].base not in COUNTERS:
            allowed = _list(list(COUNTERS))
            wrong.append(f"{columns[role].name} is {columns[role].type}, expected one of {allowed}")
    wrong += [
        f"{columns[role].name} is {columns[role].type}, expected text"
        for role in ("fail_code", "fail_reason", "locked_by")
        if columns[role].base not in ("text", "character varying")
    ]
    if wrong:
        raise TableError(f"table {table}: " + "; ".join(wrong), code="wrong_type")


def _check_events(spec: TableSpec, columns: dict[str, Column]) -> None:
    events: EventsSpec = spec.events
    table = _say(events.schema, events.table)
    missing = [name for name in (events.job_id, events.data) if name not in columns]
    if missing:
        raise TableError(
            f"event table {table} has no column {_list(missing)}; map your own names under"
            f" tables.{spec.name}.events",
            code="missing_column",
        )
    if columns[events.data].base not in ("jsonb", "json", "text"):
        raise TableError(
            f"{table}.{events.data} is {columns[events.data].type}, expected jsonb, json or text",
            code="wrong_type",
        )
    unfilled = [
        column.name
        for column in columns.values()
        if column.required and column.name not in (events.job_id, events.data)
    ]
    if unfilled:
        raise TableError(
            f"event table {table} demands {_list(unfilled)}, which job-reaper cannot fill; give"
            " each a default",
            code="events_unwritable",
        )


def _check_rights(conn: Connection, spec: TableSpec, read: list[str]) -> None:
    events = qualified(spec.events.schema, spec.events.table).as_string(conn)
    row = conn.execute(
        query("describe", "rights"),
        {
            "table": qualified(spec.schema, spec.table).as_string(conn),
            "read": read,
            "write": [getattr(spec.columns, role) for role in WRITTEN],
            "events": events,
            "event_columns": [spec.events.job_id, spec.events.data],
        },
    ).fetchone()
    assert row is not None
    may_read, unwritable, may_insert = row
    wanted = []
    if not may_read:
        wanted.append(f"SELECT on {_say(spec.schema, spec.table)}")
    if unwritable:
        wanted.append(f"UPDATE ({', '.join(unwritable)}) on {_say(spec.schema, spec.table)}")
    if not may_insert:
        wanted.append(f"INSERT on {events}")
    if wanted:
        raise TableError(
            f"the database role {conn.info.user!r} lacks {'; '.join(wanted)}; migrations/grants.sql gives"
            " exactly what a pass needs",
            code="no_rights",
        )


def _check_cast(conn: Connection, shape: TableShape) -> None:
    try:
        with conn.transaction():
            conn.execute(
                query("describe", "castable").format(
                    id=sql.Identifier(shape.spec.columns.id),
                    job_id_type=type_name(shape.job_id_type),
                    table=qualified(shape.spec.schema, shape.spec.table),
                )
            )
    except psycopg.errors.CannotCoerce as error:
        spec = shape.spec
        raise TableError(
            f"{_say(spec.schema, spec.table)}.{spec.columns.id} is {shape.id_type}, which cannot be cast to"
            f" {_say(spec.events.schema, spec.events.table)}.{spec.events.job_id} ({shape.job_id_type});"
            f" make that column text, or name another event table under tables.{spec.name}.events",
            code="wrong_type",
        ) from error


def _check_words(conn: Connection, shape: TableShape) -> None:
    """An enum or a domain may not know our words: better said here than by each row."""
    spec = shape.spec
    for role in ("queued", "processing", "failed"):
        word = getattr(spec.statuses, role)
        try:
            with conn.transaction():
                conn.execute(
                    query("describe", "castable_word").format(status_type=type_name(shape.status_type)),
                    {"word": word},
                )
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise TableError(
                f"{_say(spec.schema, spec.table)}.{spec.columns.status} is {shape.status_type}, which has no"
                f" word {word!r}; map your own words under tables.{spec.name}.statuses ({role})",
                code="wrong_type",
            ) from error


def _written_as(column: Column) -> str:
    """The type a value is cast to before it is assigned.

    An explicit cast to varchar(n) cuts the value off in silence; assigning text to it is an error.
    """
    return "text" if column.type.startswith("character") else column.type


def _say(schema: str | None, table: str) -> str:
    return f"{schema}.{table}" if schema else table


def _list(names: list[str]) -> str:
    return ", ".join(names)
