"""What a worker does while something is missing: a writable server, a free loop, a connection, a thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from reconciler.worker import JobContext, Worker, beater, job_run, session
from reconciler.worker import metrics as counted
from reconciler.worker.beat import heartbeat_batch
from tests.factories import a_queued_job, the_job
from tests.postgres import Connection
from tests.worker_fleet import eventually, one, running, status_of
from tests.worker_settings import a_fast_sdk


def a_worker(dsn: str, handler: Any, **options: Any) -> Worker:
    defaults: dict[str, Any] = {
        "sdk": a_fast_sdk(lease_sec=9), "poll_sec": 0.1, "worker_id": "worker-1", "listen": None,
    }  # fmt: skip
    return Worker(dsn, {"jobs": handler}, **(defaults | options))


# ── a server that only reads ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def read_only(conn: Connection) -> Any:
    """Switch all of the workers' new connections to read-only and back, as a failover does."""
    name = one(conn, "select current_database()")

    def switch(to: str) -> None:
        conn.execute(f'alter database "{name}" set default_transaction_read_only = {to}'.encode())
        if to == "on":
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name like 'job-reaper%' and datname = current_database()"
            )

    return switch


def test_a_job_that_ends_while_the_server_is_read_only_is_done_when_it_can_be_written(
    dsn: str, conn: Connection, read_only: Any, caplog: pytest.LogCaptureFixture
) -> None:
    job = a_queued_job(conn)

    def handle(_: JobContext) -> None:
        read_only("on")

    with running(a_worker(dsn, handle)):
        eventually(lambda: "cannot end the job, trying again" in caplog.text, timeout=8)
        read_only("off")
        eventually(lambda: status_of(conn, job) == "done", timeout=8)
    assert "refused" not in caplog.text
    assert the_job(conn, job)["attempt_count"] == 1


def test_beats_go_on_when_a_read_only_server_gives_way_to_a_writable_one(
    dsn: str, conn: Connection, read_only: Any
) -> None:
    job = a_queued_job(conn)
    let_go = threading.Event()
    with running(a_worker(dsn, lambda _: let_go.wait(30))):
        eventually(lambda: one(conn, "select last_heartbeat_at > processing_started_at from jobs"))
        failed = counted.HEARTBEAT_FAILURES.value()
        read_only("on")
        eventually(lambda: counted.HEARTBEAT_FAILURES.value() >= failed + 2, timeout=8)
        read_only("off")
        before = the_job(conn, job)["last_heartbeat_at"]
        eventually(lambda: the_job(conn, job)["last_heartbeat_at"] > before, timeout=8)
        let_go.set()
        eventually(lambda: status_of(conn, job) == "done", timeout=8)
    assert the_job(conn, job)["attempt_count"] == 1


# ── an event loop that is busy ──────────────────────────────────────────────────────────────────────


class BusyLoop:
    """The first job's handler holds the event loop on demand; every run of a later job is noted."""

    def __init__(self) -> None:
        self.block, self.blocked, self.let_go = threading.Event(), threading.Event(), threading.Event()
        self.later: list[int | None] = []

    async def __call__(self, job: JobContext) -> None:
        if job.stage != "blocks":
            self.later.append(job.attempt)
            return
        while not self.block.is_set():
            await asyncio.sleep(0.01)
        self.blocked.set()
        self.let_go.wait(30)

    def claims_while_blocked(self, conn: Connection, other: Connection) -> Any:
        """Queue a job whose claim comes through only after the loop was blocked. Returns its id."""
        with other.transaction():
            other.execute("lock table jobs in share mode")
            job = a_queued_job(other)
            claiming = (
                "select count(*) from pg_stat_activity where application_name = 'job-reaper claim'"
                " and wait_event_type = 'Lock' and datname = current_database()"
            )
            eventually(lambda: one(conn, claiming) == 1, "a claim waits for the table", timeout=8)
            self.block.set()
            assert self.blocked.wait(8)
        eventually(lambda: status_of(conn, job) == "processing", timeout=8)
        return job


def test_a_job_claimed_while_the_event_loop_is_busy_is_beaten(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    a_queued_job(conn, stage="blocks")
    loop = BusyLoop()
    with running(a_worker(dsn, loop, concurrency=2)):
        eventually(lambda: one(conn, "select bool_and(status = 'processing') from jobs"))
        try:
            job = loop.claims_while_blocked(conn, other_conn)
            beaten = "select last_heartbeat_at > processing_started_at from jobs where id = %s"
            eventually(lambda: one(conn, beaten, job), timeout=6)
            assert loop.later == []
        finally:
            loop.let_go.set()
        eventually(lambda: one(conn, "select bool_and(status = 'done') from jobs"))
    assert loop.later == [1]


def test_a_job_past_its_fence_before_its_handler_began_is_given_back(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    first = a_queued_job(conn, stage="blocks")
    conn.execute(
        "create function no() returns trigger language plpgsql as $$ begin raise 'no beat'; end $$;"
        "create trigger t before update on jobs for each row when (old.status = 'processing'"
        f" and new.status = 'processing' and old.id <> '{first}') execute function no()"
    )
    loop = BusyLoop()
    fenced = counted.LEASES_LOST.value(reason="self_fenced")
    with running(a_worker(dsn, loop, concurrency=2, sdk=a_fast_sdk(lease_sec=3))):
        eventually(lambda: one(conn, "select bool_and(status = 'processing') from jobs"))
        try:
            job = loop.claims_while_blocked(conn, other_conn)
            eventually(lambda: counted.LEASES_LOST.value(reason="self_fenced") > fenced, timeout=6)
        finally:
            loop.let_go.set()
        eventually(lambda: status_of(conn, job) == "done", timeout=8)
    row = the_job(conn, job)
    assert (row["attempt_count"], row["attempts_refunded"]) == (2, 1)
    assert loop.later == [2], "its first run was never begun"


# ── a beater that breaks, or has no connection ──────────────────────────────────────────────────────


def test_an_unexpected_error_ends_no_beats_and_no_job_is_claimed_meanwhile(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beat, broken, let_go = heartbeat_batch, threading.Event(), threading.Event()
    rounds: list[int] = []

    def breaks(*args: Any, **options: Any) -> Any:
        if broken.is_set():
            rounds.append(1)
            raise RuntimeError("can't start new thread")
        return beat(*args, **options)

    monkeypatch.setattr(beater, "heartbeat_batch", breaks)
    first = a_queued_job(conn)
    with running(a_worker(dsn, lambda _: let_go.wait(30), concurrency=2)):
        eventually(lambda: one(conn, "select last_heartbeat_at > processing_started_at from jobs"))
        broken.set()
        eventually(lambda: "heartbeat failed" in caplog.text, timeout=5)
        second = a_queued_job(conn)
        eventually(lambda: "cannot claim" in caplog.text and len(rounds) >= 3, timeout=5)
        assert status_of(conn, second) == "queued"
        broken.clear()
        eventually(lambda: status_of(conn, second) == "processing", timeout=5)
        let_go.set()
        eventually(lambda: one(conn, "select bool_and(status = 'done') from jobs"), timeout=5)
    assert caplog.text.count("heartbeat failed, trying again") == 1
    assert the_job(conn, first)["attempt_count"] == 1


def test_a_worker_without_a_connection_to_beat_with_claims_nothing(
    dsn: str, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    role = "few_" + one(conn, "select current_database()")
    conn.execute(
        f"create role {role} login connection limit 1; grant all on jobs, job_events to {role}".encode()
    )
    jobs = [a_queued_job(conn) for _ in range(3)]
    lost = counted.LEASES_LOST.value(reason="self_fenced")
    try:
        with running(a_worker(make_conninfo(dsn, user=role), lambda _: None, sdk=a_fast_sdk(lease_sec=2))):
            eventually(lambda: "cannot claim" in caplog.text, timeout=5)
            assert one(conn, "select bool_and(status = 'queued' and attempt_count = 0) from jobs")
            assert one(conn, "select application_name from pg_stat_activity where usename = %s", role) == (
                "job-reaper beat"
            )
            conn.execute(f"alter role {role} connection limit 20".encode())
            for job in jobs:
                eventually(lambda job=job: status_of(conn, job) == "done", timeout=8)  # type: ignore[misc]
    finally:
        conn.execute(f"drop owned by {role}; drop role {role}".encode())
    assert one(conn, "select bool_and(attempt_count = 1) from jobs")
    assert counted.LEASES_LOST.value(reason="self_fenced") == lost


# ── an ending whose row is locked ───────────────────────────────────────────────────────────────────


def test_an_ending_on_a_locked_row_leaves_no_waiting_backends_behind(
    dsn: str, conn: Connection, other_conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SHORT_SEC", 0.6)
    tries: list[int] = []
    write = job_run.write_ending  # type: ignore[attr-defined]

    def counting(*args: Any) -> str:
        tries.append(1)
        return str(write(*args))

    monkeypatch.setattr(job_run, "write_ending", counting)
    let_go = threading.Event()
    job = a_queued_job(conn)
    endings = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name = 'job-reaper endings' and wait_event_type = 'Lock'"
    )
    with running(a_worker(dsn, lambda _: let_go.wait(30), concurrency=4)):
        eventually(lambda: status_of(conn, job) == "processing")
        with other_conn.transaction():
            other_conn.execute("select from jobs for update")
            let_go.set()
            eventually(lambda: len(tries) >= 4, timeout=9)
            assert one(conn, endings) <= 1
        eventually(lambda: status_of(conn, job) == "done", timeout=8)
    assert the_job(conn, job)["attempt_count"] == 1
