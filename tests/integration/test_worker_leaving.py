"""Leaving: cancelled from outside, with a database that does not answer, with an ending that is not ours."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import psycopg
import pytest

from reconciler.worker import JobContext, JobError, Worker
from reconciler.worker import metrics as counted
from reconciler.worker.ending import write_ending
from tests.factories import a_queued_job, the_events, the_job
from tests.postgres import Connection
from tests.worker_fleet import eventually, one, running
from tests.worker_settings import a_fast_sdk


def a_worker(dsn: str, handler: Any, **options: Any) -> Worker:
    defaults: dict[str, Any] = {"sdk": a_fast_sdk(lease_sec=60), "poll_sec": 0.1, "worker_id": "worker-1"}
    return Worker(dsn, {"jobs": handler}, **(defaults | options))


async def poll(condition: Any, timeout: float = 8.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


def test_cancelling_run_async_gives_running_jobs_back(dsn: str, conn: Connection) -> None:
    for _ in range(2):
        a_queued_job(conn)
    began: list[Any] = []
    told: list[str] = []

    async def handle(job: JobContext) -> None:
        began.append(job.job_id)
        try:
            await asyncio.sleep(3600)
        finally:
            told.append(type(job.reason).__name__)

    async def scene() -> None:
        task = asyncio.create_task(a_worker(dsn, handle, on_shutdown="release").run_async())
        await poll(lambda: len(began) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    assert told == ["WorkerStoppingError"] * 2
    assert one(conn, "select bool_and(status = 'queued' and attempts_refunded = 1) from jobs")


def test_cancelling_run_async_gives_a_claim_that_comes_back_later_back(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    job = a_queued_job(conn)
    waiting = (
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like 'WITH picked%'"
    )

    async def scene() -> None:
        with other_conn.transaction():
            other_conn.execute("lock table jobs in share mode")
            task = asyncio.create_task(a_worker(dsn, lambda _: None, listen=None).run_async())
            await poll(lambda: one(conn, waiting))
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    row = the_job(conn, job)
    assert (row["status"], row["attempts_refunded"]) == ("queued", 1)


def test_the_handler_is_told_to_stop_though_the_event_cannot_be_written(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    a_queued_job(conn)
    began, told = threading.Event(), threading.Event()

    def handle(job: JobContext) -> None:
        began.set()
        if job.cancelled.wait(20):
            told.set()

    with other_conn.transaction():
        other_conn.execute("lock table job_events")
        with running(a_worker(dsn, handle, shutdown_timeout_sec=0.0, concurrency=1)):
            assert began.wait(8)
        assert told.is_set()
        assert one(conn, "select lease_expires_at <= clock_timestamp() from jobs")


def test_the_event_of_a_released_job_is_written_though_its_handler_stops_at_once(
    dsn: str, conn: Connection
) -> None:
    a_queued_job(conn)
    began = threading.Event()

    def handle(job: JobContext) -> None:
        began.set()
        job.cancelled.wait(20)

    with running(a_worker(dsn, handle, shutdown_timeout_sec=0.0, on_shutdown="release")):
        assert began.wait(8)
    assert one(conn, "select status from jobs") == "queued"
    assert [event["type"] for event in the_events(conn)] == ["aborted:shutdown"]


REAPED = (
    "update jobs set status = %s, locked_by = null, lease_expires_at = null, fail_code = %s,"
    " next_earliest_run_at = now() + interval '1 hour'"
)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (None, ("queued", None)),
        (None, ("failed", "timeout")),
        (JobError("NO"), ("failed", "timeout")),
        (JobError("UPSTREAM_FAILURE"), ("queued", None)),
    ],
)
def test_a_reaped_job_is_not_taken_for_ours_and_counts_as_a_lease_lost(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    error: Exception | None, verdict: tuple[str, str | None],
) -> None:  # fmt: skip
    a_queued_job(conn)
    tries: list[int] = []

    def reaped_first(*args: Any) -> str:
        tries.append(1)
        if len(tries) == 1:
            conn.execute(REAPED, verdict)
            raise psycopg.OperationalError("the statement never arrived")
        return write_ending(*args)

    def handle(_: JobContext) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("reconciler.worker.job_run.write_ending", reaped_first)
    caplog.set_level("INFO")
    before = counted.LEASES_LOST.value(reason="fenced")
    with running(a_worker(dsn, handle)):
        eventually(lambda: any(hasattr(record, "became") for record in caplog.records))
    assert [record.became for record in caplog.records if hasattr(record, "became")] == [
        "lost: another run owns it"
    ]
    assert counted.LEASES_LOST.value(reason="fenced") == before + 1
