"""The harness itself: each test gets its own database, on the majors it asked for."""

from __future__ import annotations

import psycopg
import pytest

from tests.factories import a_job, a_queued_job, the_events, the_job
from tests.postgres import Connection, PgBouncer, Server, installations_for


@pytest.mark.every_postgres
def test_a_test_that_asks_for_every_postgres_runs_on_the_major_it_was_given(
    conn: Connection, pg_server: Server
) -> None:
    assert conn.info.server_version // 10000 == pg_server.major


@pytest.mark.parametrize("attempt", [1, 2])
def test_each_test_starts_with_empty_tables(conn: Connection, attempt: int) -> None:
    a_job(conn)
    a_job(conn, "asr_jobs")
    assert conn.execute("select count(*) from jobs").fetchone() == (1,)
    assert conn.execute("select count(*) from asr_jobs").fetchone() == (1,)


def test_a_job_is_by_default_expired_and_has_attempts_left(conn: Connection) -> None:
    row = the_job(conn, a_job(conn))
    ages = conn.execute(
        "select now() - lease_expires_at > '59 s', now() - last_heartbeat_at > '359 s',"
        " now() - processing_started_at > '599 s', next_earliest_run_at is null from jobs"
    ).fetchone()
    assert ages == (True, True, True, True)
    assert (row["status"], row["locked_by"], row["attempt_count"], row["max_attempts"]) == (
        "processing",
        "worker-1",
        1,
        3,
    )


def test_a_queued_job_is_held_by_nobody(conn: Connection) -> None:
    row = the_job(conn, a_queued_job(conn, stage="asr"))
    assert row["status"] == "queued"
    assert row["stage"] == "asr"
    assert row["locked_by"] is None
    assert row["lease_expires_at"] is None


def test_events_come_back_in_the_order_they_were_written(conn: Connection) -> None:
    job = a_job(conn)
    for second in ("02", "01"):
        conn.execute(
            "insert into job_events (job_id, data) values (%s, jsonb_build_object('at', %s::text))",
            (job, f"2025-01-01T00:00:{second}Z"),
        )
    assert [event["at"][-3:-1] for event in the_events(conn, job)] == ["01", "02"]
    assert len(the_events(conn)) == 2


def test_two_connections_of_one_test_see_the_same_database(conn: Connection, other_conn: Connection) -> None:
    job = a_job(conn)
    assert the_job(other_conn, job)["id"] == job
    assert conn.info.backend_pid != other_conn.info.backend_pid


def test_an_empty_database_has_no_tables(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("select to_regclass('jobs')").fetchone() == (None,)


def test_pgbouncer_shares_server_sessions_between_clients(pgbouncer: PgBouncer, conn: Connection) -> None:
    job = a_job(conn)
    sessions = set()
    for _ in range(3):
        with psycopg.connect(pgbouncer.dsn, prepare_threshold=None) as client:
            assert the_job(client, job)["id"] == job
            row = client.execute("select pg_backend_pid()").fetchone()
            assert row is not None
            sessions.add(row[0])
    assert len(sessions) == 1


def test_an_unknown_choice_of_postgres_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(pytest.UsageError, match="--postgres=7: allowed are all, newest, "):
        installations_for("7", every_major=False)


def test_ci_refuses_to_run_on_a_single_major(monkeypatch: pytest.MonkeyPatch) -> None:
    only_one = installations_for("newest", every_major=False)
    monkeypatch.setattr("tests.postgres.newest_of_each_major", lambda: only_one)
    monkeypatch.setenv("CI", "false")
    assert installations_for(None, every_major=True) == only_one
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.UsageError, match="at least two majors"):
        installations_for(None, every_major=True)
