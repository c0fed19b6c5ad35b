"""migrations/grants.sql through a real psql: a pass and a worker can do their work, and nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import errors, sql

from reconciler.database import Database
from reconciler.errors import TableError
from reconciler.migrate import migrate
from reconciler.model import EventsSpec, Policy, Rulebook, TableSpec
from reconciler.report import PageRequest, Scan
from reconciler.shape import read_shape
from reconciler.sql import query
from reconciler.store import PgStore
from reconciler.worker import claim_next, finish_job, heartbeat_job, release_job
from tests.factories import a_job, a_queued_job, the_events, the_job
from tests.postgres import Connection, Server

GRANTS = Path(__file__).parents[2] / "migrations" / "grants.sql"


@pytest.fixture
def psql(pg_server: Server) -> Path:
    return pg_server.postgres.installation.bin_dir / "psql"


@contextmanager
def roles(conn: Connection, *names: str) -> Iterator[None]:
    """Roles belong to the whole server: they go when the test ends."""
    for name in names:
        conn.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    try:
        yield
    finally:
        for name in names:
            conn.execute(sql.SQL("drop owned by {0}").format(sql.Identifier(name)))
            conn.execute(sql.SQL("drop role {0}").format(sql.Identifier(name)))


def grant(psql: Path, dsn: str, **variables: str) -> subprocess.CompletedProcess[str]:
    settings = [word for key, value in variables.items() for word in ("-v", f"{key}={value}")]
    command = [str(psql), dsn, "-X", "-q", *settings, "-f", str(GRANTS)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)


def as_role(dsn: str, role: str) -> str:
    return psycopg.conninfo.make_conninfo(dsn, user=role)


@pytest.mark.every_postgres
def test_the_reapers_role_can_do_a_whole_pass(psql: Path, dsn: str, conn: Connection) -> None:
    stuck = a_job(conn)
    exhausted = a_job(conn, attempt=3)
    with roles(conn, "job_reaper"):
        done = grant(psql, dsn)
        assert done.returncode == 0, done.stderr
        database = Database(as_role(dsn, "job_reaper"))
        state = sql.Identifier("reaper_state")
        with psycopg.connect(as_role(dsn, "job_reaper"), autocommit=True) as reaper:
            shape = read_shape(reaper, TableSpec("jobs", "jobs"))
            usable = reaper.execute(query("state", "usable"), {"state": "reaper_state"}).fetchone()
            reaper.execute(
                query("state", "count").format(state=state),
                {"scope": "table:jobs", "counts": '{"requeues": 1}'},
            )
        store = PgStore(database, shape, Policy())
        page = store.reap(PageRequest(Scan.EXPIRED, store.survey().as_of, 100), Rulebook())
        database.close()
    assert usable == (True,)
    assert page.changed == 2
    assert the_job(conn, stuck)["status"] == "queued"
    assert the_job(conn, exhausted)["status"] == "failed"
    assert len(the_events(conn)) == 2


@pytest.mark.parametrize(
    "statement",
    [
        "select payload from jobs",
        "update jobs set payload = null",
        "update jobs set id = gen_random_uuid()",
        "update jobs set max_attempts = 99",
        "insert into jobs (status) values ('queued')",
        "delete from jobs",
        "truncate jobs",
        "delete from job_events",
        "update job_events set data = '{}'",
        "delete from reaper_state",
        "select * from reaper_migrations",
        "create table public.mine (id int)",
        "alter table jobs add mine int",
    ],
)
def test_the_reapers_role_can_do_nothing_else(psql: Path, dsn: str, conn: Connection, statement: str) -> None:
    conn.execute("alter table jobs add payload text")
    conn.execute("revoke create on schema public from public")
    with roles(conn, "job_reaper"):
        assert grant(psql, dsn).returncode == 0
        with (
            psycopg.connect(as_role(dsn, "job_reaper"), autocommit=True) as reaper,
            pytest.raises(errors.InsufficientPrivilege),
        ):
            reaper.execute(statement.encode())


def test_without_the_grants_a_pass_is_refused_and_names_them(dsn: str, conn: Connection) -> None:
    with (
        roles(conn, "job_reaper"),
        psycopg.connect(as_role(dsn, "job_reaper"), autocommit=True) as reaper,
        pytest.raises(TableError, match=r"lacks .*grants\.sql"),
    ):
        read_shape(reaper, TableSpec("jobs", "jobs"))


def test_the_script_can_be_run_again(psql: Path, dsn: str, conn: Connection) -> None:
    with roles(conn, "job_reaper"):
        assert grant(psql, dsn).returncode == 0
        assert grant(psql, dsn).returncode == 0


def test_a_worker_role_can_work_but_not_delete(psql: Path, dsn: str, conn: Connection) -> None:
    conn.execute("alter table jobs add payload text")
    for _ in range(2):
        a_queued_job(conn)
    with roles(conn, "job_reaper", "app worker"):
        done = grant(psql, dsn, worker="app worker")
        assert done.returncode == 0, done.stderr
        with psycopg.connect(as_role(dsn, "app worker"), autocommit=True) as worker:
            one, two = claim_next(worker, "jobs", "w", limit=2)
            heartbeat_job(worker, one)
            finish_job(worker, one, success=True)
            release_job(worker, two)
            with pytest.raises(errors.InsufficientPrivilege):
                worker.execute("update jobs set payload = null")
            with pytest.raises(errors.InsufficientPrivilege):
                worker.execute("delete from jobs")
    assert the_job(conn, one.id)["status"] == "done"
    assert the_job(conn, two.id)["status"] == "queued"


def test_tables_and_roles_that_need_quoting_and_serial_events_work(psql: Path, empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as owner:
        owner.execute(
            """
            create schema "My App";
            create table "My App"."Jobs" (id bigint primary key, status text, payload text);
            create table events (id serial, job_id text, data jsonb)
            """
        )
        spec = TableSpec("jobs", "Jobs", "My App", events=EventsSpec("events"))
        migrate(empty_dsn, [spec])
        a_job(owner, "My App.Jobs", id=7)
        with roles(owner, "The Reaper"):
            done = grant(psql, empty_dsn, role="The Reaper", tables='"My App"."Jobs"', events="events")
            assert done.returncode == 0, done.stderr
            database = Database(as_role(empty_dsn, "The Reaper"))
            with psycopg.connect(as_role(empty_dsn, "The Reaper"), autocommit=True) as reaper:
                store = PgStore(database, read_shape(reaper, spec), Policy())
            page = store.reap(PageRequest(Scan.EXPIRED, store.survey().as_of, 100), Rulebook())
            database.close()
        assert page.changed == 1
        assert owner.execute("select id, job_id from events").fetchall() == [(1, "7")]


def test_a_partitioned_table_is_served_by_the_grants_on_the_parent(psql: Path, empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as owner:
        owner.execute(
            """
            create table jobs (id int primary key, status text) partition by range (id);
            create table jobs_1 partition of jobs for values from (0) to (100)
            """
        )
        spec = TableSpec("jobs", "jobs")
        migrate(empty_dsn, [spec])
        a_job(owner, id=1)
        with roles(owner, "job_reaper"):
            assert grant(psql, empty_dsn, tables="jobs").returncode == 0
            database = Database(as_role(empty_dsn, "job_reaper"))
            with psycopg.connect(as_role(empty_dsn, "job_reaper"), autocommit=True) as reaper:
                store = PgStore(database, read_shape(reaper, spec), Policy())
            page = store.reap(PageRequest(Scan.EXPIRED, store.survey().as_of, 100), Rulebook())
            database.close()
        assert page.changed == 1


def test_a_table_that_does_not_exist_stops_the_script_and_grants_nothing(
    psql: Path, dsn: str, conn: Connection
) -> None:
    with roles(conn, "job_reaper"):
        done = grant(psql, dsn, tables="jobs,nowhere")
        assert done.returncode != 0
        assert "nowhere" in done.stderr
        row = conn.execute("select has_any_column_privilege('job_reaper', 'jobs', 'SELECT')").fetchone()
        assert row == (False,)
