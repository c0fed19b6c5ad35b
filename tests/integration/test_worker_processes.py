"""Workers as real processes that are killed, stopped, asked to leave and robbed of their database."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reconciler.worker import Worker
from reconciler.worker.events import ABORTED_SHUTDOWN
from tests.factories import a_queued_job, the_events, the_job
from tests.postgres import Connection, Server
from tests.worker_fleet import (
    WorkerProcess,
    an_effects_table,
    effects,
    eventually,
    missing_program,
    one,
    reap,
    running,
    status_of,
    worker_process,
)
from tests.worker_settings import a_fast_sdk


@pytest.fixture(autouse=True)
def _effects(conn: Connection) -> None:
    an_effects_table(conn)


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


# ── crashes ─────────────────────────────────────────────────────────────────────────────────────────


def test_integration_simulate_crash_kill_process_mid_job_restart_recovery_scanner_picks_up(
    dsn: str, conn: Connection
) -> None:
    job = a_queued_job(conn, stage="short")
    with worker_process(dsn) as victim:
        eventually(lambda: effects(conn, "began", job))
        victim.send(signal.SIGKILL)
        victim.wait()
    assert status_of(conn, job) == "processing"
    with worker_process(dsn):
        eventually(lambda: reap(conn), "the lease runs out")
        eventually(lambda: status_of(conn, job) == "done")
    assert the_job(conn, job)["attempt_count"] == 2
    assert effects(conn, "ended", job) == 1


def test_worker_crash_is_not_recovered_before_its_lease_timeout(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn, stage="slow")
    with worker_process(dsn, lease_sec=60) as victim:
        eventually(lambda: effects(conn, "began", job))
        victim.send(signal.SIGKILL)
        victim.wait()
    assert reap(conn) == 0
    assert status_of(conn, job) == "processing"


@pytest.mark.parametrize("beats", ["thread", "process"])
def test_sigstop_beyond_the_lease_and_back_the_zombie_changes_nothing(
    dsn: str, conn: Connection, beats: str
) -> None:
    job = a_queued_job(conn, stage="slow")
    with worker_process(dsn, lease_sec=2, heartbeat=beats) as zombie:
        eventually(lambda: effects(conn, "began", job))
        zombie.send(signal.SIGSTOP)
        eventually(lambda: reap(conn, wait_sec=3600), "a stopped worker's lease runs out")
        before = the_job(conn, job)
        conn.execute("update jobs set status = 'done'")  # another worker has run it meanwhile
        zombie.send(signal.SIGCONT)
        eventually(lambda: zombie.says("job ended"))
        assert zombie.says("lost: another run owns it"), zombie.log
    after = the_job(conn, job)
    assert after == before | {"status": "done"}
    assert effects(conn, "ended", job) == 0


def test_sigstop_of_a_stubborn_worker_is_stopped_by_the_fence_alone(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn, stage="stubborn")
    with worker_process(dsn, lease_sec=2) as zombie, worker_process(dsn, lease_sec=30) as heir:
        eventually(lambda: effects(conn, "began", job))
        first = zombie if one(conn, "select pid from effects") == zombie.pid else heir
        first.send(signal.SIGSTOP)

        def requeued() -> int:
            # Again, should a beat have been on its way when the signal came.
            conn.execute(
                "update jobs set lease_expires_at = now() - interval '1 s' where status = 'processing'"
            )
            return reap(conn)

        eventually(requeued)
        eventually(lambda: effects(conn, "began", job) == 2)
        first.send(signal.SIGCONT)
        eventually(lambda: effects(conn, "ended", job) == 2)  # both ran to their end, one of them in vain
        eventually(lambda: status_of(conn, job) == "done")
        eventually(lambda: first.says("lost: another run owns it"), "the zombie knows")
    assert the_job(conn, job)["attempt_count"] == 2


# ── leaving ─────────────────────────────────────────────────────────────────────────────────────────


def test_graceful_shutdown_send_sigterm_no_new_jobs_started_and_active_job_completes(
    dsn: str, conn: Connection
) -> None:
    active = a_queued_job(conn, stage="short")
    with worker_process(dsn, lease_sec=1, concurrency=5) as worker:
        eventually(lambda: effects(conn, "began", active))
        worker.send(signal.SIGTERM)
        eventually(lambda: worker.says("waiting for running jobs"))
        late = a_queued_job(conn)
        conn.execute("notify job_reaper_queued")
        assert worker.wait() == 0, worker.log
    assert status_of(conn, active) == "done"  # 1.5 s of work on a lease of 1 s: it was beaten to the end
    assert the_job(conn, active)["attempt_count"] == 1
    assert status_of(conn, late) == "queued"
    assert effects(conn, "began", late) == 0


def test_jobs_still_active_after_the_timeout_get_an_aborted_event_without_a_status_change(
    dsn: str, conn: Connection
) -> None:
    job = a_queued_job(conn, stage="slow")
    with worker_process(dsn, lease_sec=60, shutdown_timeout_sec=0.5) as worker:
        eventually(lambda: effects(conn, "began", job))
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.log
    assert [event["type"] for event in the_events(conn, job)] == [ABORTED_SHUTDOWN]
    row = the_job(conn, job)
    assert (row["status"], row["attempt_count"], row["attempts_refunded"]) == ("processing", 1, 0)
    assert one(conn, "select lease_expires_at <= now() from jobs"), "its lease ended at once"
    assert reap(conn) == 1


def test_a_worker_that_releases_gives_its_jobs_back_with_the_attempt_refunded(
    dsn: str, conn: Connection
) -> None:
    job = a_queued_job(conn, stage="slow")
    with worker_process(dsn, lease_sec=60, shutdown_timeout_sec=0.2, on_shutdown="release") as worker:
        eventually(lambda: effects(conn, "began", job))
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0, worker.log
    row = the_job(conn, job)
    assert (row["status"], row["attempt_count"], row["attempts_refunded"]) == ("queued", 1, 1)


def test_a_second_signal_means_now(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn, stage="slow")
    with worker_process(dsn, lease_sec=60, shutdown_timeout_sec=3600) as worker:
        eventually(lambda: effects(conn, "began", job))
        worker.send(signal.SIGTERM)
        eventually(lambda: worker.says("waiting for running jobs"))
        worker.send(signal.SIGTERM)
        assert worker.wait(20) == 0, worker.log
    assert [event["type"] for event in the_events(conn, job)] == [ABORTED_SHUTDOWN]


def test_a_handler_that_does_not_stop_keeps_its_lease_when_the_worker_leaves(
    dsn: str, conn: Connection
) -> None:
    job = a_queued_job(conn, stage="stubborn")
    with worker_process(dsn, lease_sec=60, shutdown_timeout_sec=0.1) as worker:
        eventually(lambda: effects(conn, "began", job))
        worker.send(signal.SIGTERM)
        assert worker.wait(20) == 0, worker.log
        assert worker.says("handler did not stop")
    assert one(conn, "select lease_expires_at > now() + interval '30 s' from jobs")


def test_an_async_handler_that_swallows_its_cancellation_cannot_keep_the_worker(
    dsn: str, conn: Connection
) -> None:
    job = a_queued_job(conn)
    with worker_process(dsn, program="deaf", lease_sec=60, shutdown_timeout_sec=0.1) as worker:
        eventually(lambda: effects(conn, "began", job))
        worker.send(signal.SIGTERM)
        assert worker.wait(20) == 0, worker.log
    assert effects(conn, "ignored", job) >= 1


# ── beats from a process of their own ───────────────────────────────────────────────────────────────


def test_a_handler_that_holds_the_gil_is_beaten_by_the_process(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn, stage="gil")
    expired: list[Any] = []
    with worker_process(dsn, lease_sec=2, heartbeat="process") as worker:
        eventually(lambda: effects(conn, "began", job))

        def over() -> bool:
            expired.append(
                one(conn, "select coalesce(lease_expires_at < clock_timestamp(), false) from jobs")
            )
            return bool(effects(conn, "ended", job))

        eventually(over, timeout=60)
    assert len(expired) > 20
    assert not any(expired), worker.log


def test_the_beating_process_dies_with_its_parent(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn, stage="slow")
    with worker_process(dsn, lease_sec=2, heartbeat="process") as worker:
        eventually(lambda: effects(conn, "began", job))
        (child,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        worker.send(signal.SIGKILL)
        worker.wait()
        eventually(lambda: is_gone(int(child)), "the child ends")
    eventually(lambda: reap(conn), "nobody beats for a dead worker")


def test_when_the_beating_process_dies_the_worker_beats_by_itself(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn, stage="slow")
    with worker_process(dsn, lease_sec=3, heartbeat="process") as worker:
        eventually(lambda: effects(conn, "began", job))
        (child,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        eventually(lambda: worker.says("the beating process died"))
        before = one(conn, "select clock_timestamp()")
        eventually(lambda: the_job(conn, job)["last_heartbeat_at"] > before)


# ── the database goes away ──────────────────────────────────────────────────────────────────────────


def test_postgres_restarted_mid_job_the_job_is_done_once(
    pg_server: Server, dsn: str, conn: Connection
) -> None:
    job = a_queued_job(conn, stage="short")
    with worker_process(dsn, lease_sec=20) as worker:
        eventually(lambda: effects(conn, "began", job))
        pg_server.postgres.restart()
        with psycopg.connect(dsn, autocommit=True) as again:
            eventually(lambda: status_of(again, job) == "done", worker.log)
            assert the_job(again, job)["attempt_count"] == 1
            later = a_queued_job(again)
            eventually(lambda: status_of(again, later) == "done", "claims go on after the restart")


def test_a_job_that_ends_while_postgres_is_away_is_done_when_it_is_back(
    pg_server: Server, dsn: str, conn: Connection
) -> None:
    job = a_queued_job(conn)
    with worker_process(dsn, program="brief", lease_sec=120, beat_sec=15) as worker:
        eventually(lambda: effects(conn, "began", job))
        pg_server.postgres.stop()
        try:
            eventually(lambda: worker.says("cannot end the job, trying again"), worker.log)
        finally:
            pg_server.postgres.start()
        with psycopg.connect(dsn, autocommit=True) as again:
            eventually(lambda: status_of(again, job) == "done", worker.log)
            assert the_job(again, job)["attempt_count"] == 1


def test_a_handler_that_speaks_to_the_database_survives_its_restart(
    pg_server: Server, dsn: str, conn: Connection
) -> None:
    job = a_queued_job(conn)
    with worker_process(dsn, program="staged", lease_sec=20) as worker:
        eventually(lambda: effects(conn, "began", job))
        pg_server.postgres.restart()
        with psycopg.connect(dsn, autocommit=True) as again:
            eventually(lambda: status_of(again, job) == "done", worker.log)
            assert the_job(again, job)["attempt_count"] == 1


def test_a_connection_that_is_cut_costs_nothing_but_a_reconnect(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn, stage="short")
    with worker_process(dsn, lease_sec=5) as worker:
        eventually(lambda: effects(conn, "began", job))
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'job-reaper%' and pid <> pg_backend_pid()"
        )
        eventually(lambda: status_of(conn, job) == "done")
        later = a_queued_job(conn)
        eventually(lambda: status_of(conn, later) == "done")
        assert worker.process.poll() is None
    assert the_job(conn, job)["attempt_count"] == 1


def test_a_worker_that_cannot_beat_fences_itself_before_its_lease_ends_and_ends_the_lease_later(
    dsn: str, conn: Connection
) -> None:
    """The table is locked away: connections live, beats do not come through."""
    job = a_queued_job(conn)
    stopped: list[Any] = []

    def handle(context: Any) -> None:
        context.cancelled.wait(60)
        with psycopg.connect(dsn, autocommit=True) as own:
            stopped.append(one(own, "select clock_timestamp()"))

    worker = Worker(dsn, {"jobs": handle}, sdk=a_fast_sdk(lease_sec=4), poll_sec=0.1, worker_id="w")
    with running(worker):
        eventually(lambda: status_of(conn, job) == "processing")
        with psycopg.connect(dsn) as locker:
            locker.execute("lock table jobs in share mode")  # readers see, writers wait
            lease = the_job(conn, job)["lease_expires_at"]
            eventually(lambda: stopped)
            lease = max(lease, the_job(conn, job)["lease_expires_at"])
            assert stopped[0] < lease, "cancelled before anybody else may run it"
        eventually(lambda: one(conn, "select lease_expires_at <= now() from jobs"), timeout=10)
        assert the_job(conn, job)["lease_expires_at"] < lease, "its end was brought forward under the fence"


# ── clocks ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("offset", ["+1h", "-1h"])
def test_the_workers_clock_an_hour_off_changes_no_stamp(dsn: str, conn: Connection, offset: str) -> None:
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        missing_program("faketime")
    job = a_queued_job(conn, stage="short")
    fake = {"LD_PRELOAD": str(library), "FAKETIME": offset}
    with worker_process(dsn, env=fake, lease_sec=2) as worker:
        eventually(lambda: effects(conn, "began", job))
        row = conn.execute(
            "select abs(extract(epoch from now() - processing_started_at)) < 60,"
            " lease_expires_at between now() - interval '1 s' and now() + interval '3 s' from jobs"
        ).fetchone()
        assert row == (True, True)
        eventually(lambda: status_of(conn, job) == "done")
        hour = worker.lines[0].partition("T")[2][:2]
        assert hour != one(conn, "select to_char(now() at time zone 'utc', 'HH24')"), (
            "its clock really is off"
        )
    assert the_job(conn, job)["attempt_count"] == 1


def test_a_worker_without_a_database_waits_for_it(pg_server: Server) -> None:
    worker = WorkerProcess(pg_server.postgres.dsn_for("not_there_yet"))
    try:
        worker.started()
        eventually(lambda: worker.says("cannot claim, trying again"))
        with psycopg.connect(pg_server.postgres.dsn, autocommit=True) as admin:
            admin.execute("create database not_there_yet template reaper_template")
            try:
                with psycopg.connect(pg_server.postgres.dsn_for("not_there_yet"), autocommit=True) as conn:
                    an_effects_table(conn)
                    job = a_queued_job(conn)
                    eventually(lambda: status_of(conn, job) == "done", worker.log)
            finally:
                worker.close()
                admin.execute("drop database not_there_yet with (force)")
    finally:
        worker.close()
