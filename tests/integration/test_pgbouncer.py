"""Through a real PgBouncer in transaction mode: no session state is relied upon."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.factories import a_job, the_job
from tests.postgres import Connection, PgBouncer
from tests.reaping import a_reaper, by_status, count_of, many_expired, once, one_event_per_change, one_pass

pytestmark = pytest.mark.every_postgres


def test_a_whole_pass_works_through_pgbouncer(pgbouncer: PgBouncer, conn: Connection) -> None:
    many_expired(conn, 60)
    many_expired(conn, 40, "asr_jobs", attempt=3)
    done = once(pgbouncer.dsn, REAPER_BATCH_SIZE="7")
    assert done.code == 0, done.stderr
    assert done.json["tables"]["jobs"]["counts"]["requeued"] == 60
    assert done.json["tables"]["asr_jobs"]["counts"]["failed"] == 40
    assert count_of(conn, "select count(*) from job_events") == 100
    assert count_of(conn, "select sum(value::int) from reaper_state, jsonb_each_text(counters)") == 100


def test_reapers_that_share_server_sessions_do_not_disturb_each_other(
    pgbouncer: PgBouncer, conn: Connection
) -> None:
    # Six clients on a pool of two: whatever one of them left in a session, another would find there.
    many_expired(conn, 300)
    conn.execute("drop table reaper_state")
    with ThreadPoolExecutor(6) as pool:
        passes = [pool.submit(one_pass, pgbouncer.dsn, {"batch.size": 9}) for _ in range(6)]
        reports = [future.result(120) for future in passes]
    assert [report.ok for report in reports] == [True] * 6
    assert sum(report.tables["jobs"].counts["requeued"] for report in reports) == 300
    assert by_status(conn) == {"queued": 300}
    assert one_event_per_change(conn)


def test_time_outs_hold_inside_the_transaction_and_do_not_leak_into_the_session(
    pgbouncer: PgBouncer, conn: Connection
) -> None:
    import psycopg

    job = a_job(conn)
    conn.execute(
        "create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(60); end $$"
    )
    conn.execute("create trigger slow before update on jobs for each row execute function slow()")
    report = one_pass(pgbouncer.dsn, {"database.statementTimeoutMs": 300}).tables["jobs"]
    assert [row.id for row in report.poisoned] == [str(job)]
    with psycopg.connect(pgbouncer.dsn, autocommit=True, prepare_threshold=None) as client:
        for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
            assert client.execute(f"show {name}".encode()).fetchone() == ("0",)


def test_a_session_that_pgbouncer_loses_is_replaced(pgbouncer: PgBouncer, conn: Connection) -> None:
    with a_reaper(pgbouncer.dsn) as reaper:
        assert reaper.run_once().ok
        kill = (
            "select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        assert count_of(conn, kill) > 0
        job = a_job(conn)
        assert reaper.run_once().ok
    assert the_job(conn, job)["status"] == "queued"
