"""The database as it is: tables, partitions, columns and indexes, read from pg_catalog into values.

Reading takes no lock that anybody would notice, so the whole catalogue is read again after every change:
what a killed run, another session or the app itself did is seen as it is, never as it was remembered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.rows import class_row, dict_row

from reconciler.model import EventsSpec, TableSpec
from reconciler.shape import qualified
from reconciler.sql import query, trusted

Connection = psycopg.Connection[Any]
T = TypeVar("T")
_PLAIN = re.compile(r"[a-z_][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class Server:
    """Where we are and who we are there."""

    read_only: bool
    version: int
    schema: str | None
    role: str
    pid: int


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `base` is the type below a domain, `words` the labels of an enum."""

    name: str
    type: str
    base: str
    length: int | None
    not_null: bool
    has_default: bool
    is_generated: bool
    words: list[str]


@dataclass(frozen=True, slots=True)
class Index:
    """One index. `touches` are all columns whose change makes it need a new entry."""

    oid: int
    table_oid: int
    schema: str
    name: str
    columns: list[str | None]
    includes_more: bool
    touches: list[str]
    predicate: str | None
    plain: bool
    is_rule: bool
    valid: bool
    parent: int | None


@dataclass(frozen=True, slots=True)
class Node:
    """A table or one of its partitions."""

    oid: int
    parent: int | None
    schema: str
    name: str
    kind: str
    is_ours: bool
    fillfactor: int | None


@dataclass(frozen=True, slots=True)
class Relation:
    """A configured name and what is there: `oid` 0 means nothing yet, `schema` None nowhere to put it."""

    oid: int
    schema: str | None
    name: str
    kind: str
    is_partition: bool
    owner: str
    is_ours: bool
    may_create: bool
    namesakes: tuple[str, ...] = ()
    columns: Mapping[str, Column] | None = None

    @property
    def exists(self) -> bool:
        return self.oid != 0

    @property
    def label(self) -> str:
        return label(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class Table:
    """One job table with everything a plan needs to know."""

    spec: TableSpec
    relation: Relation
    nodes: Sequence[Node]
    indexes: Sequence[Index]
    events: Relation
    castable: bool
    taken: Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the bookkeeping."""

    step: str
    target: str
    checksum: str
    detail: Mapping[str, Any]
    applied_at: str


@dataclass(frozen=True, slots=True)
class Catalog:
    """All of it at one moment."""

    server: Server
    tables: Sequence[Table]
    state: Relation
    bookkeeping: Relation
    records: Mapping[tuple[str, str], Record]


def label(schema: str | None, name: str) -> str:
    """A name as one would write it in psql, quoted only where it must be; also the bookkeeping's key."""
    parts = [part for part in (schema, name) if part is not None]
    return ".".join(part if _PLAIN.match(part) else sql.Identifier(part).as_string(None) for part in parts)


def read_catalog(
    conn: Connection, server: Server, specs: Sequence[TableSpec], state_schema: str | None, state_table: str
) -> Catalog:
    """Read everything the plan is made from."""
    state = read_relation(conn, state_schema, state_table)
    bookkeeping = read_relation(conn, state.schema, "reaper_migrations")
    return Catalog(
        server=server,
        tables=[_read_table(conn, spec) for spec in specs],
        state=state,
        bookkeeping=bookkeeping,
        records=_read_records(conn, bookkeeping),
    )


def read_server(conn: Connection) -> Server:
    return _all(conn, Server, "server")[0]


def read_relation(conn: Connection, schema: str | None, table: str) -> Relation:
    """The table of that name, or the empty place where it would be created."""
    names = {"schema": schema, "table": table}
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(query("migrate", "relation"), names).fetchone()
        if row is not None:
            columns = _all(conn, Column, "columns", {"oid": row["oid"]})
            return Relation(**row, columns={column.name: column for column in columns})
        home = cursor.execute(query("migrate", "home"), {"schema": schema}).fetchone()
        namesakes = cursor.execute(query("migrate", "namesakes"), names).fetchall()
    return Relation(
        oid=0,
        schema=home["schema"] if home else None,
        name=table,
        kind="r",
        is_partition=False,
        owner="",
        is_ours=True,
        may_create=bool(home and home["may_create"]),
        namesakes=tuple(row["name"] for row in namesakes),
    )


def _read_table(conn: Connection, spec: TableSpec) -> Table:
    relation = read_relation(conn, spec.schema, spec.table)
    nodes: list[Node] = []
    indexes: list[Index] = []
    if relation.exists:
        nodes = _all(conn, Node, "tree", {"oid": relation.oid})
        indexes = _all(conn, Index, "indexes", {"oids": [node.oid for node in nodes]})
    events = read_relation(conn, spec.events.schema, spec.events.table)
    schemas = sorted({node.schema for node in nodes} | {relation.schema or ""})
    rows = conn.execute(query("migrate", "taken"), {"schemas": schemas}).fetchall()
    return Table(
        spec=spec,
        relation=relation,
        nodes=nodes,
        indexes=indexes,
        events=events,
        castable=_castable(conn, relation, spec, events, spec.events),
        taken={(schema, name): oid for schema, name, oid in rows},
    )


def _castable(
    conn: Connection, relation: Relation, spec: TableSpec, events: Relation, names: EventsSpec
) -> bool:
    """Whether Postgres knows a cast from the table's id to the events' job_id. Fails at parse time if not."""
    id_column = (relation.columns or {}).get(spec.columns.id)
    job_id = (events.columns or {}).get(names.job_id)
    if not events.exists or job_id is None or (relation.exists and id_column is None):
        return True  # nothing to compare: a new events table takes text, a missing column is told elsewhere
    id_type = id_column.type if id_column else "uuid"
    types = {"id_type": trusted(id_type), "job_id_type": trusted(job_id.type)}
    try:
        conn.execute(query("migrate", "castable").format(**types))
    except psycopg.errors.CannotCoerce:
        return False
    return True


def _read_records(conn: Connection, bookkeeping: Relation) -> dict[tuple[str, str], Record]:
    if not bookkeeping.exists:
        return {}
    table = qualified(bookkeeping.schema, bookkeeping.name)
    statement = query("migrate", "records").format(bookkeeping=table)
    with conn.cursor(row_factory=class_row(Record)) as cursor:
        return {(record.step, record.target): record for record in cursor.execute(statement)}


def _all(conn: Connection, into: type[T], name: str, parameters: Mapping[str, Any] | None = None) -> list[T]:
    statement: sql.SQL = query("migrate", name)
    with conn.cursor(row_factory=class_row(into)) as cursor:
        return cursor.execute(statement, parameters or {}).fetchall()
