"""Two reapers at once, and connections that die: each job is changed once, with one event.

Nothing here sleeps: a barrier or a lock holds one side exactly where the test wants it.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import psycopg
import pytest

from reconciler.database import Database
from reconciler.errors import TransientError
from reconciler.model import Policy, Rulebook
from reconciler.report import PageRequest, PassReport, Scan
from reconciler.shape import read_shape
from reconciler.store import PgStore
from tests.postgres import Connection, wait_until
from tests.reaping import (
    a_reaper,
    by_status,
    count_of,
    ended,
    many_expired,
    one_event_per_change,
    one_pass,
    reapers_waiting,
    settings_for,
    started,
)

pytestmark = pytest.mark.every_postgres


# ── two reapers ─────────────────────────────────────────────────────────────────────────────────────


def test_two_reapers_in_threads_change_each_job_once(dsn: str, conn: Connection) -> None:
    many_expired(conn, 300)
    many_expired(conn, 300, attempt=3, holder="worker-2")
    conn.execute("drop table reaper_state")  # what makes them take turns: correctness must not need it
    barrier = Barrier(2)

    def run() -> PassReport:
        with a_reaper(dsn, {"batch.size": 7}) as reaper:
            barrier.wait(20)
            return reaper.run_once()

    with ThreadPoolExecutor(2) as pool:
        reports = [future.result(60) for future in [pool.submit(run), pool.submit(run)]]
    for outcome in ("requeued", "failed"):
        assert sum(report.tables["jobs"].counts[outcome] for report in reports) == 300
    assert by_status(conn) == {"queued": 300, "failed": 300}
    assert count_of(conn, "select count(*) from job_events") == 600
    assert one_event_per_change(conn)


def test_two_reapers_in_processes_change_each_job_once(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    many_expired(conn, 200)
    conn.execute("alter table reaper_state rename to elsewhere")
    # Both are let loose at once: the lock on the table holds them before their first look at it.
    with other_conn.transaction():
        other_conn.execute("lock table jobs in access exclusive mode")
        slow = {"REAPER_BATCH_SIZE": "5", "REAPER_TABLES": "jobs"}
        both: list[subprocess.Popen[str]] = [
            started(dsn, "once", "--output", "json", **slow) for _ in range(2)
        ]
        wait_until(lambda: len(reapers_waiting(conn)) == 2, timeout_sec=60)
    documents = [ended(process).json for process in both]
    assert sum(document["tables"]["jobs"]["counts"]["requeued"] for document in documents) == 200
    assert all(document["ok"] for document in documents)
    assert one_event_per_change(conn)


# ── the connection dies ─────────────────────────────────────────────────────────────────────────────


def test_a_connection_killed_inside_the_batch_is_retried_without_a_second_event(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    many_expired(conn, 5)
    conn.execute(
        "create function stand() returns trigger language plpgsql as $$ begin"
        " perform pg_advisory_xact_lock(1); return null; end $$"
    )
    conn.execute("create trigger stand after insert on job_events execute function stand()")
    with ThreadPoolExecutor(1) as pool:
        with other_conn.transaction():
            other_conn.execute("select pg_advisory_xact_lock(1)")
            running = pool.submit(one_pass, dsn, {"database.lockTimeoutMs": 20_000})
            for _ in range(2):
                (pid,) = wait_until(lambda: reapers_waiting(conn))
                conn.execute("select pg_terminate_backend(%s, 10000)", (pid,))
        report = running.result(60)
    assert report.ok
    assert report.tables["jobs"].counts["requeued"] == 5
    assert one_event_per_change(conn)
    assert count_of(conn, "select sum(value::int) from reaper_state, jsonb_each_text(counters)") == 5


def test_a_commit_whose_answer_was_lost_is_not_repeated(dsn: str, conn: Connection) -> None:
    # The server commits, the client never hears of it: the worst moment to lose a connection.
    many_expired(conn, 3)
    paused: list[float] = []
    database = Database(dsn, pause=paused.append)
    spec = settings_for(dsn).table_specs()[0]
    store = PgStore(database, database.run(lambda c: read_shape(c, spec)), Policy())
    survey = store.survey()
    lost = False

    def lose_the_answer(connection: Any, *_: object) -> None:
        nonlocal lost
        if not lost:
            lost = True
            connection.execute("commit")
            connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    store._count = lose_the_answer
    page = store.reap(PageRequest(Scan.EXPIRED, survey.as_of, limit=100), Rulebook())
    database.close()
    assert lost
    assert len(paused) == 1
    assert page.changed == 0, "the second try finds nothing left to do"
    assert by_status(conn) == {"queued": 3}
    assert one_event_per_change(conn)


def test_a_database_that_keeps_failing_is_reported_after_a_few_tries(dsn: str, conn: Connection) -> None:
    database = Database(dsn, pause=lambda _: None)
    tries = 0

    def deadlock(connection: Any) -> None:
        nonlocal tries
        tries += 1
        connection.execute("do $$ begin raise exception 'locked in' using errcode = '40P01'; end $$")

    with pytest.raises(TransientError, match="locked in"):
        database.run(deadlock)
    database.close()
    assert tries == 5
