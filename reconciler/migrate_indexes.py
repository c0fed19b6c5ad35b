"""Which index statements bring a table, plain or partitioned, to the wished set: pure.

A plain table takes CREATE INDEX CONCURRENTLY. A partitioned one cannot: its index is made empty (ON ONLY),
each partition's is built CONCURRENTLY, and attaching the last one makes the whole valid. Every statement
leaves a state from which the same plan goes on, so a run may be killed anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from psycopg import sql

from reconciler.migrate_catalog import Index, Node, Table
from reconciler.migrate_files import migrations
from reconciler.model import TableSpec
from reconciler.shape import qualified

LEASE = "006_index_status_lease"
HEARTBEAT = "007_index_status_heartbeat"
PROCESSING = "008_index_processing"
DROP = "010_drop_index"
QUEUED = "011_index_queued"
_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class Step:
    """One statement. `detail` is remembered with it, in the same transaction; so is what it `forgets`."""

    migration: str
    target: str
    title: str
    sql: str
    concurrent: bool = False
    detail: dict[str, int | None] | None = None
    forgets: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """An index as it should be, whatever table or partition it is on."""

    migration: str
    prefix: str
    suffix: str
    columns: tuple[str, ...]
    status: str | None = None
    word: str | None = None

    def name(self, table: str) -> str:
        """The name on one table, within what Postgres keeps of a name: it would cut the rest off silently."""
        name = f"{self.prefix}{table}{self.suffix}"
        if len(name.encode()) <= _NAME_BYTES:
            return name
        mark = "_" + hashlib.sha256(table.encode()).hexdigest()[:8]
        room = _NAME_BYTES - len(f"{self.prefix}{mark}{self.suffix}".encode())
        cut = table.encode()[: max(room, 0)].decode(errors="ignore")
        return f"{self.prefix}{cut}{mark}{self.suffix}"

    def same(self, index: Index) -> bool:
        """Exactly this index, under any name, valid or not. One that enforces a rule is never the same."""
        return (
            index.plain
            and tuple(index.columns) == self.columns
            and not index.includes_more
            and not index.is_rule
            and self._same_rows(index)
        )

    def serves(self, index: Index) -> bool:
        """At least this index: further key columns behind ours do no harm."""
        wide = tuple(index.columns[: len(self.columns)]) == self.columns
        return index.valid and index.plain and wide and self._same_rows(index)

    def _same_rows(self, index: Index) -> bool:
        if self.word is None or index.predicate is None:
            return self.word is None and index.predicate is None
        word = sql.Literal(self.word).as_string(None)
        simple = not any(sign in index.predicate for sign in (" AND ", " OR ", "NOT "))
        return (
            simple and f" = {word}" in index.predicate and set(index.touches) <= {*self.columns, self.status}
        )


def wishes(spec: TableSpec) -> dict[str, Wish]:
    """The indexes job-reaper knows, in the app's column names."""
    c = spec.columns
    beat = f"_{c.status}_{c.last_heartbeat_at}_idx"  # what Postgres itself would call it
    return {
        LEASE: Wish(LEASE, "idx_", "_status_lease", (c.status, c.lease_expires_at)),
        HEARTBEAT: Wish(HEARTBEAT, "", beat, (c.status, c.last_heartbeat_at)),
        PROCESSING: Wish(PROCESSING, "idx_", "_processing", (c.id,), c.status, spec.statuses.processing),
        QUEUED: Wish(
            QUEUED, "idx_", "_queued", (c.next_earliest_run_at, c.id), c.status, spec.statuses.queued
        ),
    }


@dataclass(slots=True)
class IndexPlan:
    """Steps and findings for one table, collected while its tree is walked."""

    table: Table
    root: Node
    steps: list[Step] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    done: dict[str, str] = field(default_factory=dict)

    def ensure(self, wish: Wish) -> None:
        """Plan what is missing until the whole tree has this index."""
        serving = [index for index in self._on(self.root) if wish.serves(index)]
        if serving:
            name, ours = serving[0].name, wish.name(self.root.name)
            self.done[wish.migration] = "already there" if name == ours else f"{name} does the same"
            return
        before = len(self.steps) + len(self.problems)
        self._ensure(wish, self.root)
        if len(self.steps) + len(self.problems) == before:
            self.problems.append(
                f"index {wish.name(self.root.name)} of {self.table.relation.label} is invalid although each"
                f" partition has its own: DROP INDEX it, and run migrate again"
            )

    def drop(self, wish: Wish) -> None:
        """Plan the removal of this index wherever it is, under any name."""
        for node in self._nodes():
            for index in self._on(node):
                if wish.same(index) and index.parent is None:
                    self._drop(index, node)

    def _ensure(self, wish: Wish, node: Node) -> tuple[str, str]:
        """Plan the index of one node and what lies below it; the answer is its schema and name."""
        own = self._own(wish, node)
        ours = wish.name(node.name)
        if own is None:
            self._make_room(ours, node)
            kind = "partitioned" if node.kind == "p" else "table"
            self._create(wish, node, kind, ours)
        schema, name = (own.schema, own.name) if own else (node.schema, ours)
        for child in self._children(node):
            attached = any(own is not None and i.parent == own.oid for i in self._on(child))
            if attached and child.kind != "p":
                continue
            if attached and all(i.valid for i in self._on(child) if own is not None and i.parent == own.oid):
                continue
            part = self._ensure(wish, child)
            if not attached:
                self._attach(wish, (schema, name), part)
        return schema, name

    def _own(self, wish: Wish, node: Node) -> Index | None:
        """The node's index to go on with: a valid one, or a parent that still waits for its partitions."""
        fits = [index for index in self._on(node) if wish.same(index) and (index.valid or node.kind == "p")]
        ours = [index for index in fits if index.name == wish.name(node.name)]
        usable = [*ours, *(index for index in fits if index.valid)]
        return usable[0] if usable else None

    def _make_room(self, name: str, node: Node) -> None:
        """Free the name from what a killed run left; a name that something else has is a problem."""
        oid = self.table.taken.get((node.schema, name))
        if oid is None:
            return
        holder = next((index for index in self._on(node) if index.oid == oid), None)
        if holder is not None and not holder.valid:
            self._drop(holder, node)
            return
        what = "is another index than job-reaper needs" if holder else "is something else"
        self.problems.append(
            f"the name {node.schema}.{name} is taken: it {what}. Rename it (ALTER INDEX … RENAME), then run"
            " migrate again"
        )

    def _create(self, wish: Wish, node: Node, kind: str, name: str) -> None:
        spec = self.table.spec
        statement = migrations()[wish.migration].statement(
            kind,
            index=sql.Identifier(name),  # Postgres puts an index into its table's schema
            table=qualified(node.schema, node.name),
            id=sql.Identifier(spec.columns.id),
            status=sql.Identifier(spec.columns.status),
            lease_expires_at=sql.Identifier(spec.columns.lease_expires_at),
            last_heartbeat_at=sql.Identifier(spec.columns.last_heartbeat_at),
            next_earliest_run_at=sql.Identifier(spec.columns.next_earliest_run_at),
            processing=sql.Literal(spec.statuses.processing),
            queued=sql.Literal(spec.statuses.queued),
        )
        self._add(wish.migration, f"create index {name}", statement, concurrent=kind == "table")

    def _attach(self, wish: Wish, whole: tuple[str, str], part: tuple[str, str]) -> None:
        statement = migrations()[wish.migration].statement(
            "attach", index=sql.Identifier(*whole), partition_index=sql.Identifier(*part)
        )
        self._add(wish.migration, f"attach index {part[1]} to {whole[1]}", statement)

    def _drop(self, index: Index, node: Node) -> None:
        kind = "partitioned" if node.kind == "p" else "table"
        statement = migrations()[DROP].statement(kind, index=sql.Identifier(index.schema, index.name))
        title = f"drop {'' if index.valid or kind == 'partitioned' else 'invalid '}index {index.name}"
        self._add(DROP, title, statement, concurrent=kind == "table")

    def _add(self, migration: str, title: str, statement: sql.Composed, *, concurrent: bool = False) -> None:
        label = self.table.relation.label
        self.steps.append(Step(migration, label, title, statement.as_string(None), concurrent))

    def _nodes(self) -> Sequence[Node]:
        return self.table.nodes or [self.root]

    def _children(self, node: Node) -> Iterator[Node]:
        return (child for child in self.table.nodes if child.parent == node.oid and child.oid != node.oid)

    def _on(self, node: Node) -> list[Index]:
        return [index for index in self.table.indexes if index.table_oid == node.oid]
