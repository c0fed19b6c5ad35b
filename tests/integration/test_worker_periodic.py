"""Exclusive means never twice at once: also while stopping, and while the database hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from reconciler.worker import ArgumentError, Worker, check_job_timeout, current_job
from reconciler.worker.periodic import Periodic
from tests.postgres import Connection
from tests.worker_fleet import eventually, one, running
from tests.worker_settings import a_fast_sdk

HELD = "select until > clock_timestamp() from reaper_state where scope = 'periodic:costs'"


def a_periodic(dsn: str, task: Any, ttl_sec: float = 30.0) -> Periodic:
    return Periodic(
        "costs", 60, task, exclusive=True, dsn=dsn, worker_id="w", state=("reaper_state",), ttl_sec=ttl_sec
    )


def a_worker(dsn: str) -> Worker:
    return Worker(dsn, {"jobs": lambda _: None}, sdk=a_fast_sdk(), poll_sec=0.1, worker_id="w")


def test_a_plain_task_that_does_not_stop_keeps_its_row_until_it_has_ended(dsn: str, conn: Connection) -> None:
    began, let_go = threading.Event(), threading.Event()

    def task() -> None:
        began.set()
        let_go.wait(30)

    worker = a_worker(dsn)
    worker.every(60, task, name="costs")
    with running(worker):
        assert began.wait(8)
    try:
        assert one(conn, HELD), "another worker could start it while it still runs here"
    finally:
        let_go.set()
    eventually(lambda: not one(conn, HELD), timeout=5)


def test_a_stopped_async_task_gives_its_row_back_before_the_worker_has_left(
    dsn: str, conn: Connection
) -> None:
    began = threading.Event()

    async def task() -> None:
        began.set()
        await asyncio.sleep(3600)

    worker = a_worker(dsn)
    worker.every(60, task, name="costs")
    with running(worker):
        assert began.wait(8)
        assert one(conn, HELD)
    assert not one(conn, HELD)


def test_a_task_whose_row_cannot_be_renewed_is_stopped_before_the_row_runs_out(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    began = threading.Event()
    stopped_at: list[float] = []
    held: list[Any] = []

    def task() -> None:
        job = current_job()
        assert job is not None
        began.set()
        job.cancelled.wait(30)
        stopped_at.append(time.monotonic())
        held.append(one(conn, HELD))
        check_job_timeout()

    async def scene() -> None:
        stopping = asyncio.Event()
        run = asyncio.create_task(a_periodic(dsn, task, ttl_sec=3.0).run(stopping))
        while not began.is_set():
            await asyncio.sleep(0.01)
        with other_conn.transaction():
            other_conn.execute("select from reaper_state where scope = 'periodic:costs' for update")
            while not stopped_at:
                await asyncio.sleep(0.01)
        stopping.set()
        await asyncio.wait_for(run, 8)

    asyncio.run(scene())
    assert held == [True]


def test_a_row_is_renewed_while_the_event_loop_is_busy(dsn: str, conn: Connection) -> None:
    renewed: list[bool] = []

    async def task() -> None:
        until = "select until from reaper_state where scope = 'periodic:costs'"
        first, deadline = one(conn, until), time.monotonic() + 5
        while one(conn, until) == first and time.monotonic() < deadline:
            pass  # no await: the loop does nothing else
        renewed.append(one(conn, until) > first)

    worker = a_periodic(dsn, task, ttl_sec=1.5)

    async def scene() -> None:
        stopping = asyncio.Event()
        run = asyncio.create_task(worker.run(stopping))
        while not renewed:
            await asyncio.sleep(0.01)
        stopping.set()
        await asyncio.wait_for(run, 8)

    asyncio.run(scene())
    assert renewed == [True]


def test_two_tasks_of_one_name_are_refused(dsn: str) -> None:
    worker = a_worker(dsn)
    worker.every(30, lambda: None)
    with pytest.raises(ArgumentError, match=r"name=.*<lambda>.*no other task.*pass name="):
        worker.every(30, lambda: None)
    worker.every(30, lambda: None, name="another")
