"""Beats that must come through: past locked rows, past a parent that does not read, past signals."""

from __future__ import annotations

import base64
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reconciler.worker import Worker, beat_process, claim_next
from reconciler.worker.beat_process import ProcessBeater
from reconciler.worker.keeper import Keeper
from reconciler.worker.news import as_row
from tests.factories import a_queued_job, the_job
from tests.postgres import Connection
from tests.worker_fleet import an_effects_table, effects, eventually, one, running, worker_process
from tests.worker_settings import a_fast_sdk


def test_a_locked_row_gets_its_turn_though_others_are_locked_for_longer(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    jobs = [a_queued_job(conn) for _ in range(5)]
    let_go = threading.Event()
    worker = Worker(
        dsn, {"jobs": lambda _: let_go.wait(60)}, sdk=a_fast_sdk(lease_sec=9), concurrency=5, poll_sec=0.1
    )
    waiting = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name = 'job-reaper beat, waiting for a row' and wait_event_type = 'Lock'"
        " and %s = any(pg_blocking_pids(pid))"
    )
    # Watched from outside: a transaction sees pg_stat_activity as it was at its first look.
    with psycopg.connect(dsn, autocommit=True) as outside, running(worker):
        eventually(lambda: one(conn, "select bool_and(status = 'processing') from jobs"))
        try:
            with conn.transaction(), other_conn.transaction():
                conn.execute("select from jobs where id = any(%s) for update", (jobs[:4],))
                long = conn.info.backend_pid
                eventually(lambda: one(outside, waiting, long) == 4, "all waiters are taken", timeout=5)
                other_conn.execute("select from jobs where id = %s for update", (jobs[4],))
                short = other_conn.info.backend_pid
                eventually(lambda: one(outside, waiting, short) == 1, "the fifth has its turn", timeout=6)
        finally:
            let_go.set()
        eventually(lambda: one(conn, "select bool_and(status = 'done') from jobs"))


@contextmanager
def a_beating_child(dsn: str, claims: list[Any], sdk: Any) -> Iterator[subprocess.Popen[str]]:
    """The beating process alone, its words unread."""
    child = subprocess.Popen(beat_process.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        setup = base64.b64encode(pickle.dumps((dsn, sdk.plain()))).decode("ascii")
        jobs = [{"claim": as_row(claim), "sent_at": time.monotonic(), "budget_at": None} for claim in claims]
        child.stdin.write(json.dumps({"setup": setup}) + "\n" + json.dumps({"jobs": jobs}) + "\n")
        child.stdin.flush()
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def beaten_since(conn: Connection, moment: Any) -> Any:
    return one(conn, "select min(last_heartbeat_at) > %s from jobs", moment)


def test_the_beating_process_beats_on_when_its_parent_reads_nothing(dsn: str, conn: Connection) -> None:
    sdk = a_fast_sdk(lease_sec=3)
    for _ in range(400):
        a_queued_job(conn)
    claims = claim_next(conn, "jobs", "w", limit=400, sdk=sdk)
    now = one(conn, "select clock_timestamp()")
    with a_beating_child(dsn, claims, sdk):
        for _ in range(3):
            eventually(partial(beaten_since, conn, now), timeout=8)
            now = one(conn, "select clock_timestamp()")


def test_news_are_the_latest_of_each_job_and_heard_before_the_echo(dsn: str, conn: Connection) -> None:
    sdk = a_fast_sdk(lease_sec=3)
    a_queued_job(conn)
    claims = claim_next(conn, "jobs", "w", limit=1, sdk=sdk)
    with a_beating_child(dsn, claims, sdk) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        eventually(lambda: one(conn, "select last_heartbeat_at > processing_started_at from jobs"))
        child.stdin.write('{"echo": true}\n')
        child.stdin.flush()
        heard: list[dict[str, Any]] = []
        while not any("echo" in news for news in heard):
            heard.append(json.loads(child.stdout.readline()))
    assert any(news["renewed"] for news in heard)
    assert any(news.get("ready") for news in heard)


@pytest.mark.parametrize("odd", ["not JSON", '{"renewed": 7}', "[]"])
def test_an_odd_line_from_the_beating_process_ends_nothing(
    dsn: str, conn: Connection, odd: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = f"print({odd!r}, flush=True); from reconciler.worker.beat_process import main; main()"
    monkeypatch.setattr(beat_process, "COMMAND", (sys.executable, "-c", program))
    sdk = a_fast_sdk(lease_sec=3)
    a_queued_job(conn)
    (claim,) = claim_next(conn, "jobs", "w", limit=1, sdk=sdk)
    heard: queue.Queue[float] = queue.Queue()

    class Hearing(Keeper):
        def renewed(self, claim: Any, sent_at: float) -> None:
            heard.put(sent_at)

    keeper = Hearing()
    keeper.hold(claim, sent_at=time.monotonic(), budget_sec=None, cancel=lambda _: None)
    beater = ProcessBeater(dsn, keeper, sdk)
    beater.start()
    try:
        beater.poke()
        heard.get(timeout=8)
        assert beater.ready()
    finally:
        beater.stop()
    assert caplog.text.count("says odd things") == 1
    assert "died" not in caplog.text


def test_the_beating_process_ignores_the_signals_its_parent_drains_on(dsn: str, conn: Connection) -> None:
    an_effects_table(conn)
    job = a_queued_job(conn, stage="slow")
    with worker_process(dsn, lease_sec=3, heartbeat="process") as worker:
        eventually(lambda: effects(conn, "began", job))
        (child,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(int(child), number)
        before = one(conn, "select clock_timestamp()")
        eventually(lambda: the_job(conn, job)["last_heartbeat_at"] > before, timeout=8)
        assert not worker.says("the beating process died"), worker.log
        os.kill(int(child), 0)
