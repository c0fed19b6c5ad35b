"""Requirements 7 to 10, the non-functional ones, one test (or more) each, named by its number."""

from __future__ import annotations

import pytest

from reconciler.config import load
from tests.factories import a_job, the_events, the_job
from tests.postgres import Connection, wait_until
from tests.reaping import a_reaper, count_of, delay_sec, one_pass

pytestmark = [pytest.mark.every_postgres, pytest.mark.parametrize("table", ["jobs", "asr_jobs"])]


# ── 7: every 60 s, resilient, in-app, QUEUE_* and JOB_* ─────────────────────────────────────────────


def test_requirement_7_the_interval_is_60_s_unless_configured(table: str) -> None:
    assert load(env={}).policy().interval_sec == 60
    assert load(env={"REAPER_INTERVAL_SEC": "5"}).policy().interval_sec == 5
    assert table


def test_requirement_7_an_error_in_one_table_does_not_stop_the_other(
    dsn: str, conn: Connection, table: str
) -> None:
    other = "asr_jobs" if table == "jobs" else "jobs"
    job = a_job(conn, other)
    conn.execute(f"alter table {table} drop column lease_expires_at")
    report = one_pass(dsn)
    error = report.tables[table].error
    assert error is not None
    assert error.code == "missing_column"
    assert the_job(conn, job, other)["status"] == "queued"
    assert report.exit_code == 1


def test_requirement_7_the_reaper_runs_inside_an_application_and_goes_on_after_an_error(
    dsn: str, conn: Connection, table: str
) -> None:
    conn.execute(f"alter table {table} rename column stage to hidden")
    with a_reaper(dsn, REAPER_INTERVAL_SEC="0.1") as reaper:
        reaper.start()
        try:
            seen = "select count(*) from reaper_state where updated_at > now() - interval '1 h'"
            wait_until(lambda: count_of(conn, seen))
            conn.execute(f"alter table {table} rename column hidden to stage")
            job = a_job(conn, table)
            wait_until(lambda: the_job(conn, job, table)["status"] == "queued")
        finally:
            reaper.stop()
    assert len(the_events(conn, job)) == 1


def test_requirement_7_queue_variables_are_defaults_and_job_variables_win(
    dsn: str, conn: Connection, table: str
) -> None:
    conn.execute(f"alter table {table} alter max_attempts drop not null")
    job = a_job(conn, table, attempt=2, max_attempts=None)
    one_pass(dsn, QUEUE_MAX_ATTEMPTS="2", JOB_MAX_ATTEMPTS="3")
    assert the_job(conn, job, table)["status"] == "queued"
    spent = a_job(conn, table, attempt=2, max_attempts=None)
    one_pass(dsn, QUEUE_MAX_ATTEMPTS="2")
    assert the_job(conn, spent, table)["status"] == "failed"
    waits = a_job(conn, table, attempt=3, max_attempts=9)
    one_pass(dsn, QUEUE_RETRY_BACKOFF_MS_BASE="1000", QUEUE_RETRY_BACKOFF_MS_MAX="9000")
    assert 4.0 <= delay_sec(conn, waits, table) <= 4.4
    capped = a_job(conn, table, attempt=3, max_attempts=9)
    one_pass(dsn, QUEUE_RETRY_BACKOFF_MS_BASE="1000", JOB_RETRY_BACKOFF_MS_MAX="2000")
    assert 2.0 <= delay_sec(conn, capped, table) <= 2.2


# ── 8: old workers, NULLs ───────────────────────────────────────────────────────────────────────────


def test_requirement_8_a_job_of_an_old_worker_that_fell_silent_is_queued_again(
    dsn: str, conn: Connection, table: str
) -> None:
    silent = a_job(conn, table, lease_age=None, beat_age=301, attempt=0)
    never_beat = a_job(conn, table, lease_age=None, beat_age=None, start_age=3601, attempt=0)
    one_pass(dsn)
    for job in (silent, never_beat):
        row = the_job(conn, job, table)
        assert (row["status"], row["attempt_count"]) == ("queued", 1)
        (event,) = the_events(conn, job)
        assert (event["type"], event["details"]["reason"]) == ("requeued:stale", "stale")
        assert 30 <= delay_sec(conn, job, table) <= 33


def test_requirement_8_an_old_workers_job_fails_when_this_run_was_its_last(
    dsn: str, conn: Connection, table: str
) -> None:
    job = a_job(conn, table, lease_age=None, beat_age=301, attempt=2, max_attempts=3)
    one_pass(dsn)
    row = the_job(conn, job, table)
    assert (row["status"], row["fail_code"], row["fail_reason"]) == (
        "failed",
        "RETRIES_EXHAUSTED",
        "heartbeat_stale",
    )
    assert [event["type"] for event in the_events(conn, job)] == ["reaper:failed(retries_exhausted)"]


def test_requirement_8_an_old_workers_job_that_may_still_run_is_left_alone(
    dsn: str, conn: Connection, table: str
) -> None:
    beating = a_job(conn, table, lease_age=None, beat_age=290)
    quiet = a_job(conn, table, lease_age=None, beat_age=None, start_age=3500)
    reclaimed = a_job(conn, table, lease_age=900, beat_age=10, start_age=20)
    report = one_pass(dsn).tables[table]
    assert {the_job(conn, job, table)["status"] for job in (beating, quiet, reclaimed)} == {"processing"}
    assert report.counts["requeued"] + report.counts["failed"] == 0


def test_requirement_8_a_job_without_any_stamp_is_counted_and_never_touched(
    dsn: str, conn: Connection, table: str
) -> None:
    job = a_job(conn, table, lease_age=None, beat_age=None, start_age=None, locked_by=None)
    report = one_pass(dsn).tables[table]
    assert report.counts["unleased"] == 1
    assert report.ok
    assert the_job(conn, job, table)["status"] == "processing"


# ── 9: no races ─────────────────────────────────────────────────────────────────────────────────────


def test_requirement_9_a_row_that_a_worker_has_locked_is_skipped_not_waited_for(
    dsn: str, conn: Connection, other_conn: Connection, table: str
) -> None:
    locked, free = a_job(conn, table, lease_age=90), a_job(conn, table, lease_age=60)
    with other_conn.transaction():
        other_conn.execute(f"select 1 from {table} where id = %s for update", (locked,))
        report = one_pass(dsn, {"database.lockTimeoutMs": 1000})
        assert report.tables[table].requeued_ids == [str(free)]
        assert report.ok
    assert the_job(conn, locked, table)["status"] == "processing"
    assert one_pass(dsn).tables[table].requeued_ids == [str(locked)]


def test_requirement_9_a_change_and_its_event_commit_together(dsn: str, conn: Connection, table: str) -> None:
    job = a_job(conn, table)
    conn.execute("alter table job_events add check (data ->> 'type' <> 'reaper:requeued')")
    report = one_pass(dsn).tables[table]
    assert [poison.id for poison in report.poisoned] == [str(job)]
    assert the_job(conn, job, table)["status"] == "processing"
    assert the_events(conn) == []


# ── 10: the life of a job, as the documents tell it ─────────────────────────────────────────────────


def test_requirement_10_a_job_dies_three_times_and_is_failed_with_its_whole_story_told(
    dsn: str, conn: Connection, table: str
) -> None:
    from reconciler.worker import claim_next, heartbeat_job
    from tests.factories import a_queued_job

    job = a_queued_job(conn, table, stage="clip")
    for _ in range(3):
        (claim,) = claim_next(conn, table, "worker-1")
        heartbeat_job(conn, claim)
        assert one_pass(dsn).tables[table].counts["requeued"] == 0, "a beaten job is left alone"
        conn.execute(
            f"update {table} set lease_expires_at = now() - interval '1 s',"
            " processing_started_at = now() - interval '5 min'"
        )
        one_pass(dsn)
        conn.execute(
            f"update {table} set next_earliest_run_at = now() - interval '1 s' where status = 'queued'"
        )
    assert the_job(conn, job, table)["status"] == "failed"
    assert claim_next(conn, table, "worker-1") == []
    events = [
        (event["type"], event["details"]["attempt"])
        for event in the_events(conn, job)
        if "reaper" in event["type"]
    ]
    assert events == [("reaper:requeued", 1), ("reaper:requeued", 2), ("reaper:failed(timeout)", 3)]
