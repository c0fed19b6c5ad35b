"""Leaving: cancelled from outside, with a database that does not answer, with an ending that is not ours."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reconciler.worker import JobContext, Worker
from tests.factories import a_queued_job, the_job
from tests.postgres import Connection
from tests.worker_fleet import one
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
