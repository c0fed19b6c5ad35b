"""The acceptance criteria of the requirements document, one test (or more) each, named by its number.

Requirements 7 to 10 follow in test_requirements_around.py. Requirement 4 and the worker's half of
requirement 3 are proven by test_worker_primitives.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.factories import a_job, the_events, the_job
from tests.postgres import Connection
from tests.reaping import a_reaper, count_of, delay_sec, one_pass

pytestmark = [pytest.mark.every_postgres, pytest.mark.parametrize("table", ["jobs", "asr_jobs"])]

LOCK_FIELDS = ("locked_by", "lease_expires_at", "last_heartbeat_at", "processing_started_at")


def metric(reaper: Any, name: str, **labels: str) -> float:
    value = reaper.metrics.registry.get_sample_value(name, labels)
    return 0.0 if value is None else float(value)


# ── 1: requeue ──────────────────────────────────────────────────────────────────────────────────────


def test_requirement_1_an_expired_job_with_attempts_left_is_queued_again(
    dsn: str, conn: Connection, table: str
) -> None:
    job = a_job(conn, table, attempt=1, max_attempts=3, stage="clip")
    report = one_pass(dsn)
    row = the_job(conn, job, table)
    assert report.tables[table].requeued_ids == [str(job)]
    assert row["status"] == "queued"
    assert {field: row[field] for field in LOCK_FIELDS} == dict.fromkeys(LOCK_FIELDS)
    assert row["attempt_count"] == 1
    assert (row["fail_code"], row["fail_reason"]) == (None, None)
    assert 30 <= delay_sec(conn, job, table) <= 33


def test_requirement_1_a_requeue_leaves_its_event(dsn: str, conn: Connection, table: str) -> None:
    job = a_job(conn, table, attempt=2, max_attempts=3, stage="asr", locked_by="worker-7")
    before = the_job(conn, job, table)
    one_pass(dsn)
    (event,) = the_events(conn, job)
    assert event["type"] == "reaper:requeued"
    assert event["table"] == table
    details = event["details"]
    assert details["reason"] == "lease_expired"
    assert details["verdict"] == "UNKNOWN"
    assert details["locked_by"] == "worker-7"
    assert (details["attempt"], details["max_attempts"]) == (2, 3)
    assert details["stage"] == "asr"
    assert details["fail_code"] is None
    assert details["pod"] is None
    assert 120 <= details["backoff_sec"] <= 132
    for field in ("lease_expires_at", "last_heartbeat_at", "processing_started_at"):
        assert count_of(conn, "select %s::timestamptz", (details[field],)) == before[field]


def test_requirement_1_a_requeue_is_counted(dsn: str, conn: Connection, table: str) -> None:
    a_job(conn, table, stage="clip")
    with a_reaper(dsn, with_metrics=True) as reaper:
        reaper.run_once()
        labels = {"table": table, "stage": "clip", "reason": "lease_expired"}
        assert metric(reaper, "reaper_requeues_total", **labels) == 1
        a_job(conn, table, stage="clip")
        reaper.run_once()
        assert metric(reaper, "reaper_requeues_total", **labels) == 2
        assert metric(reaper, "reaper_failures_total", **labels) == 0


# ── 2: fail ─────────────────────────────────────────────────────────────────────────────────────────


def test_requirement_2_an_expired_job_without_attempts_left_is_failed(
    dsn: str, conn: Connection, table: str
) -> None:
    cases = [(3, 3), (4, 3), (0, 0), (1, -1)]
    jobs = {a_job(conn, table, attempt=attempt, max_attempts=most): attempt for attempt, most in cases}
    report = one_pass(dsn)
    assert set(report.tables[table].failed_ids) == {str(job) for job in jobs}
    for job, attempt in jobs.items():
        row = the_job(conn, job, table)
        assert row["status"] == "failed"
        assert row["fail_code"] == "timeout"
        assert row["fail_reason"] == "lease_expired"
        assert {field: row[field] for field in LOCK_FIELDS} == dict.fromkeys(LOCK_FIELDS)
        assert row["attempt_count"] == attempt
        (event,) = the_events(conn, job)
        assert event["type"] == "reaper:failed(timeout)"
        assert event["details"]["fail_code"] == "timeout"
        assert event["details"]["backoff_sec"] is None


def test_requirement_2_refunded_attempts_do_not_exhaust_a_job(dsn: str, conn: Connection, table: str) -> None:
    job = a_job(conn, table, attempt=5, refunded=3, max_attempts=3)
    one_pass(dsn)
    assert the_job(conn, job, table)["status"] == "queued"
    # Two attempts count: the second wait.
    assert 120 <= delay_sec(conn, job, table) <= 132


def test_requirement_2_a_failure_is_counted(dsn: str, conn: Connection, table: str) -> None:
    a_job(conn, table, attempt=3, stage="burnin")
    with a_reaper(dsn, with_metrics=True) as reaper:
        reaper.run_once()
        labels = {"table": table, "stage": "burnin", "reason": "lease_expired"}
        assert metric(reaper, "reaper_failures_total", **labels) == 1
        assert metric(reaper, "reaper_requeues_total", **labels) == 0


# ── 3: stages ───────────────────────────────────────────────────────────────────────────────────────


def test_requirement_3_the_reaper_leaves_a_long_lease_alone_until_it_ends(
    dsn: str, conn: Connection, table: str
) -> None:
    # An ASR job of one hour holds its job for twelve; the last beat was long ago, the lease decides.
    job = a_job(conn, table, stage="asr", expected_ms=3_600_000, lease_age=-3600, beat_age=30_000)
    assert one_pass(dsn).tables[table].counts["requeued"] == 0
    assert the_job(conn, job, table)["status"] == "processing"
    conn.execute(f"update {table} set lease_expires_at = now() - interval '1 ms'")
    assert one_pass(dsn).tables[table].counts["requeued"] == 1


def test_requirement_3_a_lease_no_stage_explains_is_not_believed(
    dsn: str, conn: Connection, table: str
) -> None:
    # Two days ahead: too far for the default stage, right for an ASR job of five hours (12 x 5 h = 60 h).
    odd = a_job(conn, table, lease_age=-172_800, beat_age=301, start_age=301)
    long = a_job(conn, table, stage="asr", expected_ms=18_000_000, lease_age=-172_800, beat_age=301)
    one_pass(dsn)
    assert the_job(conn, odd, table)["status"] == "queued"
    assert the_job(conn, long, table)["status"] == "processing"


def test_requirement_3_the_factor_of_a_stage_comes_from_the_environment(
    dsn: str, conn: Connection, table: str
) -> None:
    # 30 h expected and a lease 70 h ahead: believed with factor 2 (2 x 60 h), not with factor 1 (2 x 30 h).
    for stage in ("clip", "asr", "burnin"):
        job = a_job(conn, table, stage=stage, expected_ms=108_000_000, lease_age=-252_000, beat_age=110_000)
        for factor, status in {"2": "processing", "1": "queued"}.items():
            env: dict[str, Any] = {f"{stage.upper()}_SLA_FACTOR": factor}
            one_pass(dsn, **env)
            assert the_job(conn, job, table)["status"] == status


# ── 5: backoff ──────────────────────────────────────────────────────────────────────────────────────


def test_requirement_5_the_wait_grows_with_each_attempt(dsn: str, conn: Connection, table: str) -> None:
    waits = {0: 30, 1: 30, 2: 120, 3: 600, 4: 600, 40: 600}
    jobs = {a_job(conn, table, attempt=attempt, max_attempts=100): sec for attempt, sec in waits.items()}
    one_pass(dsn)
    for job, seconds in jobs.items():
        assert seconds <= delay_sec(conn, job, table) <= seconds * 1.1
        (event,) = the_events(conn, job)
        assert event["details"]["backoff_sec"] == pytest.approx(delay_sec(conn, job, table), abs=0.002)


def test_requirement_5_a_requeued_job_is_not_dispatched_before_its_time(
    dsn: str, conn: Connection, table: str
) -> None:
    from reconciler.worker import claim_job, claim_next

    job = a_job(conn, table)
    one_pass(dsn)
    assert claim_next(conn, table, "worker-2") == []
    assert claim_job(conn, table, str(job), "worker-2") is None
    conn.execute(f"update {table} set next_earliest_run_at = now() - interval '1 ms'")
    (claim,) = claim_next(conn, table, "worker-2")
    assert (claim.id, claim.attempt) == (job, 2)


def test_requirement_5_a_job_that_is_not_due_waits_but_an_exhausted_one_fails(
    dsn: str, conn: Connection, table: str
) -> None:
    early = a_job(conn, table, due_age=-600)
    spent = a_job(conn, table, due_age=-600, attempt=3)
    report = one_pass(dsn).tables[table]
    assert (report.counts["not_due"], report.counts["failed"]) == (1, 1)
    assert the_job(conn, early, table)["status"] == "processing"
    assert the_job(conn, spent, table)["status"] == "failed"
    assert the_events(conn, early) == []


# ── 6: events and metrics ───────────────────────────────────────────────────────────────────────────


def test_requirement_6_every_action_has_one_event_and_is_measured(
    dsn: str, conn: Connection, table: str
) -> None:
    kept = a_job(conn, table, lease_age=-60)
    acted = {a_job(conn, table): "reaper:requeued", a_job(conn, table, attempt=3): "reaper:failed(timeout)"}
    with a_reaper(dsn, with_metrics=True) as reaper:
        reaper.run_once()
        for other in ("jobs", "asr_jobs"):
            assert metric(reaper, "reaper_scan_duration_ms_count", table=other) == 1
            assert metric(reaper, "reaper_scan_duration_ms_sum", table=other) > 0
        assert metric(reaper, "reaper_time_to_recover_seconds_count", table=table) == 1
        assert 60 <= metric(reaper, "reaper_time_to_recover_seconds_sum", table=table) < 120
        assert 60 <= metric(reaper, "reaper_oldest_expired_seconds", table=table) < 120
        assert metric(reaper, "reaper_last_success_timestamp_seconds") > 0
    for job, kind in acted.items():
        (event,) = the_events(conn, job)
        assert set(event) == {"type", "table", "details", "at"}
        assert (event["type"], event["table"]) == (kind, table)
    assert the_events(conn, kept) == []
