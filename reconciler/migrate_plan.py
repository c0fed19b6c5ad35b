"""From the catalogue as it is to the statements still missing: pure, so that a dry run shows exactly these.

The plan is made anew after every statement. What is there counts, not what was once recorded: a run that
was killed, an index the app already had, a column a colleague added by hand are all simply found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from psycopg import sql

from reconciler.migrate_catalog import Catalog, Node, Table, label
from reconciler.migrate_checks import problems, roles
from reconciler.migrate_files import migrations
from reconciler.migrate_indexes import HEARTBEAT, LEASE, PROCESSING, QUEUED, IndexPlan, Step, Wish, wishes
from reconciler.shape import qualified

Heartbeats = Literal["default", "hot"]

BOOKKEEPING = "001_reaper_migrations"
STATE = "002_reaper_state"
JOB_TABLE = "003_job_table"
EVENTS = "004_job_events"
COLUMNS = "005_lease_columns"
HEAP_ROOM = "009_heap_room"
CHOICE = "heartbeats"
"""The bookkeeping's word for the chosen index set of a table."""

HOT_FILLFACTOR = 80


@dataclass(slots=True)
class Plan:
    """What is missing, what is there and why it counts, what stands in the way."""

    steps: list[Step] = field(default_factory=list)
    done: dict[tuple[str, str], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    choices: dict[str, Heartbeats] = field(default_factory=dict)


def make_plan(catalog: Catalog, heartbeats: Heartbeats | None, default_max_attempts: int) -> Plan:
    """All statements that are still missing, in order. With problems, none may run."""
    plan = Plan(problems=[*_edited(catalog), *problems(catalog)])
    if plan.problems:
        return plan
    _own_tables(plan, catalog)
    for table in catalog.tables:
        _job_table(plan, table)
        _events(plan, table)
        _columns(plan, table, default_max_attempts)
    for table in catalog.tables:
        choice = heartbeats or _chosen(catalog, table)
        plan.choices[table.relation.label] = choice
        _index_set(plan, catalog, table, choice)
        _warn(plan, table, choice)
    plan.steps = list({step.sql: step for step in plan.steps}.values())  # an events table shared by two
    plan.problems = list(dict.fromkeys(plan.problems))
    return plan


def _edited(catalog: Catalog) -> list[str]:
    """Files that are no longer what was applied: the database would not be what the files say."""
    found = []
    for record in catalog.records.values():
        if record.step == CHOICE:
            continue
        migration = migrations().get(record.step)
        if migration is None:
            found.append(
                f"{record.step} was applied to {record.target} at {record.applied_at} by a newer job-reaper:"
                " use that version or a later one"
            )
        elif migration.checksum != record.checksum:
            found.append(
                f"{record.step}.sql was edited after it was applied to {record.target} at {record.applied_at}"
                f" (checksum {record.checksum[:12]}, now {migration.checksum[:12]}): restore the file, and"
                " put the change into a new one"
            )
    return found


def _own_tables(plan: Plan, catalog: Catalog) -> None:
    for name, key, relation in (
        (BOOKKEEPING, "bookkeeping", catalog.bookkeeping),
        (STATE, "state", catalog.state),
    ):
        if relation.exists:
            plan.done[name, relation.label] = "already there"
        else:
            statement = migrations()[name].statement(
                "create", **{key: qualified(relation.schema, relation.name)}
            )
            _add(plan, name, relation.label, f"create table {relation.label}", statement)


def _job_table(plan: Plan, table: Table) -> None:
    relation, spec = table.relation, table.spec
    if relation.exists:
        plan.done[JOB_TABLE, relation.label] = "already there"
        return
    statement = migrations()[JOB_TABLE].statement(
        "create",
        table=qualified(relation.schema, relation.name),
        id=sql.Identifier(spec.columns.id),
        status=sql.Identifier(spec.columns.status),
        queued=sql.Literal(spec.statuses.queued),
    )
    _add(plan, JOB_TABLE, relation.label, f"create table {relation.label}", statement)


def _events(plan: Plan, table: Table) -> None:
    relation, names = table.events, table.spec.events
    if relation.exists:
        plan.done[EVENTS, relation.label] = "already there"
        return
    migration = migrations()[EVENTS]
    values: Mapping[str, sql.Composable] = {
        "events": qualified(relation.schema, relation.name),
        "job_id": sql.Identifier(names.job_id),
        "data": sql.Identifier(names.data),
        "events_index": sql.Identifier(Wish(EVENTS, "", f"_{names.job_id}_idx", ()).name(relation.name)),
    }
    # One transaction: table and index come together or not at all.
    text = ";\n".join(migration.statement(name, **values).as_string(None) for name in ("create", "index"))
    plan.steps.append(Step(EVENTS, relation.label, f"create table {relation.label}", text))


def _columns(plan: Plan, table: Table, default_max_attempts: int) -> None:
    relation = table.relation
    names = roles(table.spec.columns)
    there = relation.columns or (names["id"], names["status"])  # a table of our own is born with these two
    missing = [name for name in names.values() if name not in there]
    if relation.exists and not missing:
        plan.done[COLUMNS, relation.label] = "every column is there"
        return
    statement = migrations()[COLUMNS].statement(
        "table",
        table=qualified(relation.schema, relation.name),
        default_max_attempts=sql.Literal(default_max_attempts),
        **{role: sql.Identifier(name) for role, name in names.items()},
    )
    title = f"add {len(missing)} columns to {relation.label}"
    _add(plan, COLUMNS, relation.label, title, statement)


def _chosen(catalog: Catalog, table: Table) -> Heartbeats:
    """Which set this table has: as chosen once, else as its indexes say (the bookkeeping may be lost)."""
    record = catalog.records.get((CHOICE, table.relation.label))
    if record is not None:
        return "hot" if record.detail.get("set") == "hot" else "default"
    known = wishes(table.spec)
    has = {name for name, wish in known.items() if any(wish.serves(index) for index in table.indexes)}
    return "hot" if PROCESSING in has and LEASE not in has else "default"


def _index_set(plan: Plan, catalog: Catalog, table: Table, choice: Heartbeats) -> None:
    root = table.nodes[0] if table.nodes else _unborn(table)
    indexes = IndexPlan(table, root)
    known = wishes(table.spec)
    hot, documents = [PROCESSING, QUEUED], [LEASE, HEARTBEAT, QUEUED]
    wanted = hot if choice == "hot" else documents
    for name in wanted:  # first the new, then away with the old: the scans always have an index
        indexes.ensure(known[name])
    plan.steps += indexes.steps
    indexes.steps = []
    _heap_room(plan, catalog, table, choice)
    for name in sorted(known.keys() - set(wanted)):
        indexes.drop(known[name])
    plan.steps += indexes.steps
    plan.problems += indexes.problems
    for name, reason in indexes.done.items():
        plan.done[name, table.relation.label] = reason


def _heap_room(plan: Plan, catalog: Catalog, table: Table, choice: Heartbeats) -> None:
    migration = migrations()[HEAP_ROOM]
    for node in table.nodes or [_unborn(table)]:
        if node.kind != "r":
            continue
        name = qualified(node.schema, node.name)
        target = label(node.schema, node.name)
        record = catalog.records.get((HEAP_ROOM, target))
        if choice == "hot" and (node.fillfactor or 100) > HOT_FILLFACTOR:
            statement = migration.statement("set", table=name, fillfactor=sql.Literal(HOT_FILLFACTOR))
            title = f"leave a fifth of each page of {target} free"
            step = Step(
                HEAP_ROOM, target, title, statement.as_string(None), detail={"before": node.fillfactor}
            )
            plan.steps.append(step)
        elif choice == "default" and record is not None and node.fillfactor == HOT_FILLFACTOR:
            # Only what we set is taken back; a fillfactor the app chose since then stays.
            before = record.detail.get("before")
            statement = (
                migration.statement("reset", table=name)
                if before is None
                else migration.statement("set", table=name, fillfactor=sql.Literal(before))
            )
            title = f"fill the pages of {target} as before"
            plan.steps.append(Step(HEAP_ROOM, target, title, statement.as_string(None), forgets=True))


def _warn(plan: Plan, table: Table, choice: Heartbeats) -> None:
    """What is not ours to change, but the operator should know."""
    name, columns = table.relation.label, table.spec.columns
    if table.relation.exists and not any(i.valid and i.columns[0] == columns.id for i in table.indexes):
        plan.warnings.append(
            f"no index of {name} starts with {columns.id}: claims and beats read the whole table"
        )
    if choice != "hot":
        return
    going = [wishes(table.spec)[name] for name in (LEASE, HEARTBEAT)]
    beaten = {columns.lease_expires_at, columns.last_heartbeat_at}
    for index in table.indexes:
        touched = beaten & set(index.touches)
        if touched and index.parent is None and not any(wish.same(index) for wish in going):
            plan.warnings.append(
                f"index {index.name} of {name} holds {', '.join(sorted(touched))}: beats cannot be HOT"
                " updates while it exists (it is the app's, so it was left)"
            )


def _unborn(table: Table) -> Node:
    """The table that a step of this very plan creates."""
    relation = table.relation
    return Node(0, None, relation.schema or "", relation.name, "r", is_ours=True, fillfactor=None)


def _add(plan: Plan, migration: str, target: str, title: str, statement: sql.Composed) -> None:
    plan.steps.append(Step(migration, target, title, statement.as_string(None)))
