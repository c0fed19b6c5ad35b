"""How the pass reads: by an index whatever the statistics say, and each row once, page by page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from reconciler.database import Database
from reconciler.migrate import Heartbeats, migrate
from reconciler.model import Mode, Policy, Rule, Rulebook, TableSpec, Verdict
from reconciler.ports import NullCluster
from reconciler.reap import reap_table
from reconciler.record import PassRecorder
from reconciler.report import Page, PageRequest, Scan
from reconciler.shape import read_shape
from reconciler.statements import Statements, policy_parameters, rule_parameters
from reconciler.store import PgStore
from tests.postgres import Connection

DONE = 200_000
LIVE = 1_500
EXPIRED = 300
SPEC = TableSpec("jobs", "jobs")
SOMEBODY = Rulebook({"w1": Rule(Verdict.ALIVE, Mode.CAPPED)}, default=None)

# ── plans ───────────────────────────────────────────────────────────────────────────────────────────


def fill_running(conn: Connection) -> None:
    conn.execute(
        "insert into jobs (status, locked_by, lease_expires_at, last_heartbeat_at, processing_started_at)"
        " select 'processing', 'w' || n %% 50,"
        " now() - make_interval(secs => case when n <= %s then n else -300 end),"
        " now() - interval '6 min', now() - interval '20 min' from generate_series(1, %s) as n",
        (EXPIRED, EXPIRED + LIVE),
    )


@dataclass(frozen=True)
class Read:
    """One visit to the table in a plan that was run."""

    node: str
    index: str | None
    rows: float


def reads(plan: dict[str, Any], index: str | None = None) -> Iterator[Read]:
    """Every node that touched the job table's rows, and how many it looked at."""
    index = plan.get("Index Name", index)
    inner = [read for part in plan.get("Plans", ()) for read in reads(part)]
    if plan.get("Relation Name") == "jobs" and plan["Node Type"] != "ModifyTable":
        looked_at = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
        yield Read(plan["Node Type"], index, looked_at * plan["Actual Loops"])
    yield from inner


def statements(shape: Any, as_of: str) -> Iterator[tuple[str, sql.Composed, dict[str, Any]]]:
    """Every statement of a pass, with parameters as a pass gives them."""
    made = Statements(shape)
    parameters = {
        **policy_parameters(Policy(), shape),
        "as_of": as_of,
        "limit": 100,
        "after_lease": "2020-01-01T00:00:00+00:00",
        "after_id": "00000000-0000-0000-0000-000000000000",
        "only_id": "00000000-0000-0000-0000-000000000000",
        "cap": None,
        "deferred_detail": 10,
    }
    yield "survey", made.survey, parameters | {"as_of": None}
    yield "holders", made.holders, parameters
    yield "processing_count", made.processing_count, {}
    for scan, resume in product(Scan, (False, True)):
        yield f"peek {scan} {resume}", made.peek(scan, resume=resume), parameters
        # A batch shrinks to few rows around one that cannot be written: the plan must not change with it.
        for rulebook, limit, only in product((Rulebook(), SOMEBODY), (1, 100, 5000), (False, True)):
            per_holder = rulebook is SOMEBODY
            statement = made.reap(scan, resume=resume, only=only, per_holder=per_holder)
            name = f"reap {scan} {resume=} {only=} {per_holder=} {limit=}"
            yield name, statement, parameters | rule_parameters(rulebook) | {"limit": limit}


def check_plans(conn: Connection, statistics: str) -> None:
    shape = read_shape(conn, SPEC)
    row = conn.execute(
        Statements(shape).survey, policy_parameters(Policy(), shape) | {"as_of": None}
    ).fetchone()
    assert row is not None
    as_of = row[0]
    for name, statement, parameters in statements(shape, as_of):
        with conn.transaction(force_rollback=True):
            row = conn.execute(
                sql.SQL("explain (analyze, timing off, format json) ") + statement, parameters
            ).fetchone()
        assert row is not None
        found = list(reads(row[0][0]["Plan"]))
        assert found, f"{name}: the plan does not touch jobs at all?"
        for read in found:
            told = f"{name}, statistics {statistics}: {found}"
            assert read.node != "Seq Scan", told
            assert read.rows <= LIVE + EXPIRED, f"finished rows were read: {told}"


@pytest.mark.every_postgres
@pytest.mark.parametrize("heartbeats", ["standard", "hot"])
def test_no_statement_of_a_pass_reads_finished_rows(
    dsn: str, conn: Connection, heartbeats: Heartbeats
) -> None:
    migrate(dsn, heartbeats=heartbeats)
    conn.execute("alter table jobs set (autovacuum_enabled = off)")
    conn.execute("insert into jobs (status) select 'done' from generate_series(1, %s)", (DONE,))
    fill_running(conn)
    check_plans(conn, "never taken")
    conn.execute("delete from jobs where status = 'processing'")
    conn.execute("analyze jobs")
    fill_running(conn)
    check_plans(conn, "from before the outage")
    conn.execute("analyze jobs")
    check_plans(conn, "fresh")


# ── pages ───────────────────────────────────────────────────────────────────────────────────────────

ROWS = 120
LIMIT = 7


def a_table_with_ids_of(empty_dsn: str, id_type: str) -> Connection:
    conn = psycopg.connect(empty_dsn, autocommit=True)
    conn.execute(
        sql.SQL("create table jobs (id {} primary key, status text not null)").format(sql.SQL(id_type))
    )
    migrate(empty_dsn)
    return conn


NEW_ID: dict[str, LiteralString] = {
    "uuid": "gen_random_uuid()",
    "bigint": "(hashint8(n)::bigint << 31) + n",
    "text": "case n % 4 when 0 then '''\"%s{}' when 1 then 'Ä' when 2 then 'a' else 'A b' end || n",
}
LEASES: dict[Scan, LiteralString] = {
    # Few distinct leases: most pages begin and end among equals.
    Scan.EXPIRED: "date_trunc('day', now()) - (n % 3) * interval '1 day'",
    Scan.STALE: "null::timestamptz",
    Scan.FAR: "case n % 3 when 0 then 'infinity' when 1 then '294276-12-31' else '12026-01-01' end"
    "::timestamptz",
}


APART: dict[Scan, LiteralString] = {
    # Every lease its own: a page that others' locks have thinned out ends at a lease, short.
    Scan.EXPIRED: "now() - n * interval '1 hour'",
    Scan.STALE: "null::timestamptz",
    Scan.FAR: "'12026-01-01'::timestamptz + n * interval '1 hour'",
}


def fill(
    conn: Connection, scan: Scan, id_type: str, leases: Mapping[Scan, LiteralString] = LEASES
) -> set[str]:
    conn.execute(
        sql.SQL(
            "insert into jobs (id, status, locked_by, lease_expires_at, last_heartbeat_at, max_attempts)"
            " select {id}, 'processing', 'w' || n % 3, {lease}, now() - interval '10 days', 9"
            " from generate_series(1, {rows}) as n order by md5(n::text)"
        ).format(id=sql.SQL(NEW_ID[id_type]), lease=sql.SQL(leases[scan]), rows=sql.Literal(ROWS))
    )
    return {row[0] for row in conn.execute("select id::text from jobs")}


def pages(store: PgStore, request: PageRequest, rulebook: Rulebook) -> Iterator[Page]:
    while True:
        page = store.reap(request, rulebook)
        yield page
        if page.rows < request.limit:
            return
        request = replace(request, after=page.last_key)


@pytest.mark.every_postgres
@pytest.mark.parametrize("id_type", ["uuid", "bigint", "text"])
@pytest.mark.parametrize("scan", list(Scan))
@pytest.mark.parametrize("dry_run", [False, True])
def test_pages_visit_each_row_once(empty_dsn: str, scan: Scan, id_type: str, dry_run: bool) -> None:
    """A third is deferred in the middle of every page, a third is not asked about, a third is requeued."""
    policy = Policy(liveness=replace(Policy().liveness, defer_max_sec=10**9, defer_factor=10.0**9))
    rulebook = Rulebook({"w0": Rule(Verdict.ALIVE, Mode.CAPPED), "w1": Rule()}, default=None)
    with a_table_with_ids_of(empty_dsn, id_type) as conn:
        ids = fill(conn, scan, id_type)
        database = Database(empty_dsn)
        store = PgStore(database, read_shape(conn, SPEC), policy)
        survey = store.survey()
        assert survey.count(scan) == survey.candidates == ROWS
        request = PageRequest(scan, survey.as_of, limit=LIMIT, deferred_detail=LIMIT, dry_run=dry_run)
        seen = list(pages(store, request, rulebook))
        deferred = [str(row_id) for page in seen for row_id in page.deferred]
        changed = [str(change.id) for page in seen for change in page.changes]
        judged = sum((Counter(page.judged) for page in seen), Counter[str]())
        assert sum(page.rows for page in seen) == ROWS
        assert judged == {"deferred": ROWS // 3, "requeued": ROWS // 3, "no_rule": ROWS // 3}
        assert len(set(deferred)) == len(deferred) == ROWS // 3
        assert len(set(changed)) == len(changed) == ROWS // 3
        assert {*deferred, *changed} < ids
        left = {row[0] for row in conn.execute("select id::text from jobs where status = 'processing'")}
        assert left == (ids if dry_run else ids - {*changed})
        assert conn.execute("select count(*) from job_events").fetchone() == (0 if dry_run else ROWS // 3,)
        database.close()


@pytest.mark.every_postgres
@pytest.mark.parametrize("scan", list(Scan))
def test_a_pass_goes_on_behind_rows_that_others_hold(empty_dsn: str, scan: Scan) -> None:
    policy = replace(Policy(), batch_size=LIMIT)
    with a_table_with_ids_of(empty_dsn, "bigint") as conn, psycopg.connect(empty_dsn) as worker:
        ids = fill(conn, scan, "bigint", APART)
        held = {
            row[0]
            for row in worker.execute(
                "select id::text from jobs where id in"
                " (select id from jobs order by lease_expires_at, id offset 3 limit 20) for update"
            )
        }
        assert len(held) == 20
        database = Database(empty_dsn)
        store = PgStore(database, read_shape(conn, SPEC), policy)
        report = reap_table(store, NullCluster(), policy, PassRecorder())
        database.close()
        assert report.ok
        assert {str(row_id) for row_id in report.requeued_ids} == ids - held
        assert report.counts["requeued"] == ROWS - 20
        assert report.counts["moved_on"] == 20
