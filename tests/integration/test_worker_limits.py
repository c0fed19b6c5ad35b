"""What a run that must stop can still do: nothing to its lease, its successor or its budget."""

from __future__ import annotations

from typing import Any

from reconciler.worker import JobContext, Worker
from tests.factories import a_queued_job, the_job
from tests.postgres import Connection
from tests.worker_fleet import eventually, one, running, status_of
from tests.worker_settings import a_fast_sdk


def a_worker(dsn: str, handler: Any, **options: Any) -> Worker:
    defaults: dict[str, Any] = {"sdk": a_fast_sdk(), "poll_sec": 0.1, "worker_id": "worker-1"}
    return Worker(dsn, {"jobs": handler}, **(defaults | options))


def test_a_cancelled_job_cannot_extend_its_own_lease(dsn: str, conn: Connection) -> None:
    job_id = a_queued_job(conn)
    refused: list[str] = []

    def handle(job: JobContext) -> None:
        job.cancelled.wait(30)
        before = the_job(conn, job_id)["lease_expires_at"]
        for call in (lambda: job.set_stage("clip"), lambda: job.emit("progress"), job.row):
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - which one it is, is the question
                refused.append(type(error).__name__)
        assert the_job(conn, job_id)["lease_expires_at"] == before

    with running(a_worker(dsn, handle, max_runtime=0.3)):
        eventually(lambda: status_of(conn, job_id) == "failed")
    assert refused == ["JobTimeoutError"] * 3
    assert the_job(conn, job_id)["fail_code"] == "JOB_TIMEOUT"
    assert one(conn, "select count(*) from job_events") == 0
