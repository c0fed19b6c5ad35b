"""What a run that must stop can still do: nothing to its lease, its successor or its budget."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from reconciler.worker import JobContext, JobError, RetryDecision, Worker, to_thread, with_stage
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


@pytest.mark.parametrize("heartbeat", ["thread", "process"])
def test_max_runtime_follows_the_stage_that_the_run_enters(
    dsn: str, conn: Connection, heartbeat: Any
) -> None:
    job_id = a_queued_job(conn)
    told = threading.Event()

    def handle(job: JobContext) -> None:
        with with_stage("clip"):
            assert job.remaining(None) <= 0.5
            if job.cancelled.wait(8):
                told.set()

    limits = {"clip": 0.5, "jobs": 3600}
    with running(a_worker(dsn, handle, max_runtime=limits, heartbeat=heartbeat)):
        eventually(lambda: status_of(conn, job_id) == "failed", timeout=9)
    assert told.is_set()
    assert the_job(conn, job_id)["fail_code"] == "JOB_TIMEOUT"


def test_a_stage_with_a_longer_budget_gives_the_run_that_time(dsn: str, conn: Connection) -> None:
    job_id = a_queued_job(conn, stage="clip")
    left: list[float] = []

    def handle(job: JobContext) -> None:
        first = job.budget_at
        assert first is not None
        job.set_stage("asr")
        left.append(job.remaining(None))
        # Past the first stage's end, and not cancelled.
        assert not job.cancelled.wait(max(0.0, first - time.monotonic()) + 0.3)
        job.set_stage("clip")
        job.check()

    with running(a_worker(dsn, handle, max_runtime={"clip": 1.0, "asr": 600})):
        eventually(lambda: status_of(conn, job_id) == "failed", timeout=9)
    assert left[0] > 500
    assert the_job(conn, job_id)["fail_code"] == "JOB_TIMEOUT", "entering a stage again buys no time"


@pytest.mark.parametrize(
    ("error", "classify", "code"),
    [
        (JobError(404), None, "404"),
        (JobError(503, retryable=True), None, "503"),
        (ValueError(), lambda _: RetryDecision(False, 404), "404"),  # type: ignore[arg-type]
    ],
)
def test_a_code_that_is_a_number_ends_the_job_all_the_same(
    dsn: str, conn: Connection, error: Exception, classify: Any, code: str
) -> None:
    job_id = a_queued_job(conn, max_attempts=1)

    def handle(_: JobContext) -> None:
        raise error

    with running(a_worker(dsn, handle, **({} if classify is None else {"classify": classify}))):
        eventually(lambda: status_of(conn, job_id) == "failed", timeout=8)
    assert the_job(conn, job_id)["fail_code"] == code


def test_a_job_is_not_given_back_while_a_thread_of_its_async_handler_works(
    dsn: str, conn: Connection
) -> None:
    job_id = a_queued_job(conn)
    began, let_go = threading.Event(), threading.Event()
    cancelled: list[bool] = []

    def work() -> None:
        began.set()
        let_go.wait(20)

    async def handle(job: JobContext) -> None:
        try:
            await to_thread(work)
        finally:
            cancelled.append(job.cancelled.is_set())

    worker = a_worker(dsn, handle, shutdown_timeout_sec=0.0, on_shutdown="release")
    with running(worker):
        assert began.wait(8)
        worker.stop()
        eventually(lambda: cancelled, timeout=8)
        assert status_of(conn, job_id) == "processing", "the thread still works"
        let_go.set()
    assert cancelled == [True]
    assert status_of(conn, job_id) == "queued"
