"""The SDK reads what the reaper reads: environment over REAPER_CONFIG over defaults. And PgBouncer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reconciler.config import load
from reconciler.identity import parse_identity
from reconciler.worker import Sdk, Worker, claim_job, claim_next, configure, retry_job, worker_identity
from tests.factories import a_queued_job, the_job
from tests.postgres import Connection, PgBouncer
from tests.worker_fleet import eventually, running, status_of
from tests.worker_settings import a_fast_sdk


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    configure(None)
    yield
    configure(None)


def lease_of(conn: Connection, job: Any) -> int:
    row = the_job(conn, job)
    return int((row["lease_expires_at"] - row["last_heartbeat_at"]).total_seconds())


@pytest.mark.parametrize(
    ("variable", "stage", "lease"),
    [
        ({}, "clip", 600), ({"CLIP_SLA_FACTOR": "10"}, "clip", 1000), ({"ASR_SLA_FACTOR": "4.5"}, "asr", 450),
        ({"BURNIN_SLA_FACTOR": "9"}, "burnin", 900), ({"DEFAULT_LEASE_SEC": "777"}, None, 777),
        ({"QUEUE_VISIBILITY_SEC": "444"}, None, 444),
        ({"QUEUE_VISIBILITY_SEC": "444", "DEFAULT_LEASE_SEC": "555"}, None, 555),
    ],
)  # fmt: skip
def test_requirement_3_the_environment_tunes_the_lease(
    conn: Connection, monkeypatch: pytest.MonkeyPatch, variable: dict[str, str], stage: str | None, lease: int
) -> None:
    for key, value in variable.items():
        monkeypatch.setenv(key, value)
    job = a_queued_job(conn, stage=stage, expected_ms=100_000)
    claim_job(conn, "jobs", job, "w")
    assert lease_of(conn, job) == lease


def test_a_new_stage_in_the_configmap_needs_no_code(
    conn: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "reaper.yaml").write_text("stages:\n  thumbnail:\n    factor: 5\n")
    monkeypatch.setenv("REAPER_CONFIG", str(tmp_path / "reaper.yaml"))
    job = a_queued_job(conn, stage="thumbnail", expected_ms=100_000)
    claim_job(conn, "jobs", job, "w")
    assert lease_of(conn, job) == 500


def test_job_max_attempts_holds_where_the_row_says_nothing(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute("alter table jobs drop column max_attempts")
    monkeypatch.setenv("JOB_MAX_ATTEMPTS", "1")
    job = conn.execute("insert into jobs (status) values ('queued') returning id").fetchone()
    assert job is not None
    claim = claim_job(conn, "jobs", job[0], "w")
    assert claim is not None
    assert not retry_job(conn, claim, code="X").requeued


def test_settings_reach_the_worker() -> None:
    sdk = Sdk.of(load(env={"MAX_CONCURRENCY": "7", "SCRATCH_DIR": "/scratch", "HEARTBEAT_SEC": "12"}))
    worker = Worker("", {"jobs": lambda job: None}, sdk=sdk)
    assert worker.concurrency == 7
    assert sdk.scratch_dir == "/scratch"
    assert sdk.policy.heartbeat_sec == 12


def test_the_reaper_can_read_the_identity_the_worker_writes() -> None:
    env = {"POD_NAMESPACE": "media", "POD_NAME": "clip-0", "POD_UID": "1b2c", "CONTAINER_NAME": "worker"}
    found = parse_identity(worker_identity(env, boot_unix_ms=1700000000123))
    assert found is not None
    assert (found.namespace, found.pod, found.uid, found.container) == ("media", "clip-0", "1b2c", "worker")
    assert found.boot_ms == 1700000000123
    assert parse_identity(worker_identity({}), ["{namespace}/{pod}", "{pod}"], "media") is None


def test_a_worker_runs_behind_pgbouncer_in_transaction_mode(pgbouncer: PgBouncer, conn: Connection) -> None:
    jobs = [a_queued_job(conn, stage="clip") for _ in range(20)]
    worker = Worker(
        pgbouncer.dsn,
        {"jobs": lambda job: job.set_stage("asr")},
        sdk=a_fast_sdk(),
        poll_sec=0.1,
        listen=None,  # LISTEN needs a session of its own
    )
    with running(worker):
        for job in jobs:
            eventually(lambda job=job: status_of(conn, job) == "done")  # type: ignore[misc]


def test_primitives_run_behind_pgbouncer(pgbouncer: PgBouncer, conn: Connection) -> None:
    for _ in range(12):
        a_queued_job(conn)
    with psycopg.connect(pgbouncer.dsn, autocommit=True, prepare_threshold=None) as pooled:
        claims = [claim_next(pooled, "jobs", "w")[0] for _ in range(12)]
    assert len({claim.id for claim in claims}) == 12
