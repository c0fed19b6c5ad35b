"""Workers for tests: in a thread of this process, or as real processes that can be killed.

Nothing here sleeps to synchronise: `eventually` polls a condition until a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from reconciler.reaper import Reaper
from reconciler.worker import Worker
from tests.ci import in_ci
from tests.postgres import Connection

PATIENCE_SEC = 30.0


def eventually(condition: Callable[[], Any], what: str = "", timeout: float = PATIENCE_SEC) -> Any:
    """Poll until the condition is true and return its value; fail with its name after the deadline."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or condition}"
        time.sleep(0.02)


@contextmanager
def running(worker: Worker) -> Iterator[Worker]:
    """Run a worker in a thread; stop it at the end, and fail when it broke or does not stop."""
    broke: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            broke.append(error)

    thread = threading.Thread(target=run, name="worker under test")
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(PATIENCE_SEC)
        if thread.is_alive():
            worker.stop()
            thread.join(PATIENCE_SEC)
        assert not thread.is_alive(), "the worker does not stop"
    if broke:
        raise broke[0]


def one(conn: Connection, statement: str, *params: Any) -> Any:
    """The first column of the first row."""
    row = conn.execute(statement.encode(), params or None).fetchone()
    return None if row is None else row[0]


def status_of(conn: Connection, job: Any, table: str = "jobs") -> Any:
    return one(conn, f'select status from "{table}" where id = %s', job)


def reap(conn: Connection, *, wait_sec: float = 0.001) -> int:
    """One pass of the real reaper, with a delay of the test's choice. How many jobs it changed."""
    delay = str(int(wait_sec * 1000))
    env = {"JOB_RETRY_BACKOFF_MS_BASE": delay, "JOB_RETRY_BACKOFF_MS_MAX": delay, "REAPER_LIVENESS": "off"}
    reaper = Reaper(conn.info.dsn, env=env)
    try:
        report = reaper.run_once()
    finally:
        reaper.close()
    assert report.ok, report
    return sum(table.counts["requeued"] + table.counts["failed"] for table in report.tables.values())


def an_effects_table(conn: Connection) -> None:
    """Where the handlers of tests/worker_program.py tell what they did, fenced or not."""
    conn.execute(
        "create table if not exists effects (job_id text, attempt int, pid int, what text,"
        " at timestamptz default clock_timestamp());"
        "create table if not exists results (job_id text primary key, attempt int)"
    )


def effects(conn: Connection, what: str, job: Any = None) -> int:
    """How often a handler told that."""
    return int(
        one(
            conn,
            "select count(*) from effects where what = %s and (%s::text is null or job_id = %s)",
            what,
            None if job is None else str(job),
            str(job),
        )
    )


class WorkerProcess:
    """tests/worker_program.py as a process of its own."""

    def __init__(self, dsn: str, *, env: dict[str, str] | None = None, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker_program"],
            env={**os.environ, "DATABASE_URL": dsn, "WORKER_OPTIONS": json.dumps(options), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def pid(self) -> int:
        return self.process.pid

    def started(self) -> WorkerProcess:
        eventually(lambda: self.says("worker started") or self.process.poll() is not None, "start")
        assert self.process.poll() is None, self.log
        return self

    def says(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE_SEC) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def worker_process(dsn: str, **options: Any) -> Iterator[WorkerProcess]:
    """A started worker that never outlives its test."""
    worker = WorkerProcess(dsn, **options)
    try:
        yield worker.started()
    finally:
        worker.close()


def missing_program(name: str) -> None:
    """Skip on a developer's machine; in CI a test that cannot run is a failure."""
    sentence = f"{name} is not installed: run scripts/ci-packages"
    if in_ci():
        pytest.fail(sentence)
    pytest.skip(sentence)
