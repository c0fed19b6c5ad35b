"""What must be true of the app's tables before anything is changed: pure, every problem at once.

Existing columns are never altered. A type that cannot hold what job-reaper writes is the app's to change,
because only the app knows what its old values mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reconciler.migrate_catalog import Catalog, Column, Relation, Server, Table
from reconciler.model import Columns, TableSpec

_OLDEST_SERVER = 130000
_STAMPS = ("lease_expires_at", "last_heartbeat_at", "processing_started_at", "next_earliest_run_at")
_COUNTERS = ("attempt_count", "attempts_refunded", "max_attempts", "expected_duration_ms")
_WORDS = ("locked_by", "fail_code", "fail_reason")
_CLEARED = ("locked_by", *_STAMPS)
_TEXT = ("text", "character varying", "citext")
_INTEGERS = ("smallint", "integer", "bigint")
_IDS = ("uuid", *_INTEGERS, *_TEXT)
_LONGEST_FAIL_CODE = len("RETRIES_EXHAUSTED")
_KINDS = {"v": "view", "m": "materialized view", "f": "foreign table", "S": "sequence", "c": "composite type"}
STATE_COLUMNS = ("scope", "holder", "until", "last_success_at", "resumed_at", "counters", "updated_at")


def problems(catalog: Catalog) -> list[str]:
    """Everything that stands in the way, as sentences that say what to do."""
    found = [*_server(catalog.server)]
    for table in catalog.tables:
        found += _place(table.relation, catalog.server, f"tables.{table.spec.name}")
        if table.relation.exists and table.relation.kind in ("r", "p"):
            found += _job_table(table)
        found += _place(table.events, catalog.server, f"tables.{table.spec.name}.events", owned=False)
        if table.events.exists and table.events.kind in ("r", "p"):
            found += _events(table)
    for relation, key in ((catalog.state, "state"), (catalog.bookkeeping, "state")):
        found += _place(relation, catalog.server, key, lonely=False, owned=relation is catalog.bookkeeping)
    if catalog.state.exists and catalog.state.kind in ("r", "p"):
        missing = [name for name in STATE_COLUMNS if name not in (catalog.state.columns or {})]
        if missing:
            found.append(
                f"{catalog.state.label} exists without {', '.join(missing)}: it is not job-reaper's;"
                " name another table or schema under state"
            )
    return list(dict.fromkeys(found))


def _server(server: Server) -> Iterator[str]:
    if server.version < _OLDEST_SERVER:
        yield f"this is Postgres {server.version // 10000}; job-reaper needs version 13 or newer"
    if server.read_only:
        yield "the database is read-only: point DATABASE_URL at the primary"


def _place(
    relation: Relation, server: Server, key: str, *, lonely: bool = True, owned: bool = True
) -> Iterator[str]:
    """Whether the name leads to a table we may change, or to a place where we may create one."""
    label, role = relation.label, server.role
    if not relation.exists:
        if relation.schema is None:
            yield (
                f"there is no schema for {relation.name}: create it, or correct {key}.schema"
                " (with none configured, the search_path must name one that exists)"
            )
        elif lonely and relation.namesakes:
            # An empty table beside the real one would make the reaper guard nothing, and nobody would notice.
            yield (
                f"there is no table {label}, but there is {', '.join(relation.namesakes)}: if that is meant,"
                f" say so under {key} (schema, table); if a new table is, create {label} yourself"
            )
        elif not relation.may_create:
            yield f"role {role} may not create {label}: GRANT CREATE ON SCHEMA {relation.schema} TO {role}"
        return
    if relation.kind not in ("r", "p"):
        kind = _KINDS.get(relation.kind, f"relation of kind {relation.kind}")
        yield f"{label} is a {kind}, not a table: name the table below it under {key}"
    elif relation.is_partition and owned:
        yield f"{label} is a partition: name the partitioned table it belongs to under {key}"
    elif owned and not relation.is_ours:
        yield (
            f"{label} belongs to {relation.owner}, and role {role} may not alter it: run migrate as"
            f" {relation.owner}, or GRANT {relation.owner} TO {role}"
        )
    elif owned and not relation.may_create:
        yield (
            f"role {role} may not create indexes in schema {relation.schema}:"
            f" GRANT CREATE ON SCHEMA {relation.schema} TO {role}"
        )


def _job_table(table: Table) -> Iterator[str]:
    spec, label = table.spec, table.relation.label
    columns = table.relation.columns or {}
    there = {role: columns[name] for role, name in roles(spec.columns).items() if name in columns}
    for role in ("id", "status"):
        if role not in there:
            yield (
                f"{label} has no column {getattr(spec.columns, role)}: map the app's own name under"
                f" tables.{spec.name}.columns.{role}"
            )
    for role, column in there.items():
        for text in (_wrong_type(role, column, label), _not_clearable(role, column, label)):
            if text:
                yield text
        if column.is_generated and role != "id":
            yield f"{label}.{column.name} is generated: job-reaper could not write it"
    if "status" in there:
        yield from _status_words(spec, there["status"], label)
    for node in table.nodes:
        if node.kind == "f":
            yield f"{node.schema}.{node.name}, a partition of {label}, is a foreign table: no row locks there"
        elif not node.is_ours and table.relation.is_ours:
            yield f"{node.schema}.{node.name}, a partition of {label}, belongs to another role: make them one"


def _wrong_type(role: str, column: Column, label: str) -> str | None:
    name, base = column.name, column.base
    if role in _STAMPS and base != "timestamp with time zone":
        return (
            f"{label}.{name} is {column.type}, but only timestamptz says which instant is meant:"
            f" ALTER TABLE {label} ALTER {name} TYPE timestamptz USING {name} AT TIME ZONE 'UTC'"
            ", if it was written in UTC"
        )
    allowed = {
        "id": _IDS,
        **dict.fromkeys(_COUNTERS, _INTEGERS),
        **dict.fromkeys(_WORDS, _TEXT[:2]),
        "status": _TEXT,
        "stage": _TEXT,
    }.get(role)
    is_word = role in ("status", "stage") and bool(column.words)
    if allowed and base not in allowed and not is_word:
        names = ", ".join(allowed)
        return f"{label}.{name} is {column.type}; allowed are {names}: change it, or map another column"
    if role == "fail_code" and column.length is not None and column.length < _LONGEST_FAIL_CODE:
        return (
            f"{label}.{name} is {column.type}, too short for RETRIES_EXHAUSTED:"
            f" ALTER TABLE {label} ALTER {name} TYPE text"
        )
    return None


def _not_clearable(role: str, column: Column, label: str) -> str | None:
    if role in _CLEARED and column.not_null:
        return (
            f"{label}.{column.name} is NOT NULL, but a requeue clears it:"
            f" ALTER TABLE {label} ALTER {column.name} DROP NOT NULL"
        )
    return None


def _status_words(spec: TableSpec, column: Column, label: str) -> Iterator[str]:
    words = {
        "queued": spec.statuses.queued,
        "processing": spec.statuses.processing,
        "failed": spec.statuses.failed,
    }
    unknown = {key: word for key, word in words.items() if column.words and word not in column.words}
    for key, word in unknown.items():
        yield (
            f"{label}.{column.name} ({column.type}) does not know the word {word!r}: map the app's own word"
            f" (one of {', '.join(column.words)}) under tables.{spec.name}.statuses.{key}"
        )
    longest = max(words.values(), key=len)
    if column.length is not None and column.length < len(longest):
        yield f"{label}.{column.name} is {column.type}, too short for {longest!r}"


def _events(table: Table) -> Iterator[str]:
    spec, label = table.spec, table.events.label
    columns: Mapping[str, Column] = table.events.columns or {}
    ours = (spec.events.job_id, spec.events.data)
    missing = [name for name in ours if name not in columns]
    if missing:
        names = ", ".join(missing)
        yield f"{label} has no column {names}: map the app's names under tables.{spec.name}.events"
        return
    data = columns[spec.events.data]
    if data.base not in ("jsonb", "json", "text"):
        yield f"{label}.{data.name} is {data.type}; allowed are jsonb, json, text"
    if not table.castable:
        yield (
            f"{table.relation.label}.{spec.columns.id} cannot be cast to {label}.{spec.events.job_id}"
            f" ({columns[spec.events.job_id].type}): make that column text, or name another event table under"
            f" tables.{spec.name}.events"
        )
    unfilled = [
        c.name
        for c in columns.values()
        if c.not_null and not c.has_default and not c.is_generated and c.name not in ours
    ]
    if unfilled:
        yield f"{label} demands {', '.join(unfilled)}, which job-reaper cannot fill: give each a default"


def roles(columns: Columns) -> dict[str, str]:
    """Our word for each column and the app's name for it."""
    return {name: getattr(columns, name) for name in Columns.__slots__}
