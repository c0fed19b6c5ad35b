"""The role that migrations/grants.sql makes can do a whole pass, whichever way it goes, and nothing more."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.factories import a_job, the_events
from tests.postgres import Connection, Server
from tests.reaping import by_status, count_of, many_expired, once, one_event_per_change, one_pass

pytestmark = pytest.mark.every_postgres

GRANTS = Path(__file__).parents[2] / "migrations" / "grants.sql"
ROLE = "reaper_by_grants"


@pytest.fixture
def role_dsn(dsn: str, conn: Connection, pg_server: Server) -> Iterator[str]:
    """The database as a fresh role sees it that has exactly what the script grants."""
    conn.execute("alter table jobs add payload text default 'secret'")
    conn.execute("create table customers (name text)")
    conn.execute(f"create role {ROLE} login".encode())
    psql = pg_server.postgres.installation.bin_dir / "psql"
    script = [str(psql), dsn, "-X", "-q", "-v", f"role={ROLE}", "-f", str(GRANTS)]
    try:
        subprocess.run(script, check=True, capture_output=True, timeout=30)
        yield psycopg.conninfo.make_conninfo(dsn, user=ROLE)
    finally:
        conn.execute(f"drop owned by {ROLE}; drop role {ROLE}".encode())


def test_it_can_do_a_whole_pass_as_a_process(role_dsn: str, conn: Connection) -> None:
    many_expired(conn, 30)
    for table in ("jobs", "asr_jobs"):
        a_job(conn, table, attempt=3)
        a_job(conn, table, lease_age=None)
        a_job(conn, table, lease_age=-(10**8))
    dry = once(role_dsn, "--dry-run", REAPER_BATCH_SIZE="7")
    assert dry.code == 0, dry.stderr
    done = once(role_dsn, REAPER_BATCH_SIZE="7")
    assert done.code == 0, done.stderr
    assert done.json["tables"]["jobs"]["counts"] == dry.json["tables"]["jobs"]["counts"]
    assert by_status(conn) == {"queued": 32, "failed": 1}
    assert by_status(conn, "asr_jobs") == {"queued": 2, "failed": 1}
    assert count_of(conn, "select count(*) from job_events") == 36
    assert done.said("pass done")[0]["counters_kept"]
    assert sum(total["count"] for total in done.json["totals"]) == 36


def test_it_can_brake_and_step_over_poison(role_dsn: str, conn: Connection) -> None:
    many_expired(conn, 9)
    assert one_pass(role_dsn, {"brake.maxExpiredShare": 0.5}).exit_code == 3
    assert one_pass(role_dsn, {"brake.outageGraceSec": 60}).ok
    many_expired(conn, 9)
    odd = count_of(
        conn, "select id from jobs where status = 'processing' order by lease_expires_at offset 4 limit 1"
    )
    conn.execute(f"alter table job_events add check (job_id <> '{odd}')".encode())
    report = one_pass(role_dsn).tables["jobs"]
    assert [row.id for row in report.poisoned] == [str(odd)]
    assert report.counts["requeued"] == 8
    assert one_event_per_change(conn)


FORBIDDEN = (
    "select payload from jobs",
    "update jobs set payload = 'x'",
    "insert into jobs (status) values ('queued')",
    "delete from jobs",
    "truncate jobs",
    "update jobs set id = gen_random_uuid()",
    "update jobs set max_attempts = 99",
    "update job_events set data = '{}'",
    "delete from job_events",
    "delete from reaper_state",
    "select * from customers",
    "create table public.mine (x int)",
    "alter table jobs add column x int",
    "drop table jobs",
    "select * from reaper_migrations",
)


def test_it_can_do_nothing_more(role_dsn: str, conn: Connection) -> None:
    a_job(conn)
    with psycopg.connect(role_dsn, autocommit=True) as reaper:
        for statement in FORBIDDEN:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                reaper.execute(statement.encode())
    assert by_status(conn) == {"processing": 1}
    assert the_events(conn) == []
