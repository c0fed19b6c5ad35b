"""`job-reaper run` as systemd would start it, and the same inside an application."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reconciler.demo.postgres import EmbeddedPostgres
from reconciler.migrate import migrate
from tests.factories import a_job, the_events, the_job
from tests.postgres import Connection, wait_until
from tests.reaping import (
    a_reaper,
    by_status,
    count_of,
    many_expired,
    one_event_per_change,
    reapers_waiting,
    started,
)


class Running:
    """A `job-reaper run` whose log is read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.put(json.loads(line))

    def next(self, message: str) -> dict[str, Any]:
        """The next line that says this; others are passed over."""
        while True:
            line = self.lines.get(timeout=60)
            if line["msg"] == message:
                return line

    def end(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@contextmanager
def a_run(dsn: str, **env: str) -> Iterator[tuple[Running, str]]:
    """The process and the address it listens at."""
    process = started(dsn, "run", REAPER_METRICS_PORT="0", **{"REAPER_INTERVAL_SEC": "0.2", **env})
    running = Running(process)
    try:
        line = running.next("reaper started")
        yield running, f"http://127.0.0.1:{line['metrics_port']}"
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def fetched(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_run_reaps_again_and_again_and_serves_its_metrics(dsn: str, conn: Connection) -> None:
    with a_run(dsn) as (running, url):
        for attempt in (1, 3):
            job = a_job(conn, stage="clip", attempt=attempt)
            wait_until(lambda job=job: the_job(conn, job)["status"] != "processing")
            assert len(the_events(conn, job)) == 1
        running.next("pass done")
        metric = 'reaper_requeues_total{reason="lease_expired",stage="clip",table="jobs"} 1.0'
        wait_until(lambda: metric in fetched(f"{url}/metrics")[1])
        body = fetched(f"{url}/metrics")[1]
        assert 'reaper_failures_total{reason="lease_expired",stage="clip",table="jobs"} 1.0' in body
        for name in ("scan_duration_ms_bucket", "time_to_recover_seconds_bucket", "oldest_expired_seconds"):
            assert f"reaper_{name}" in body
        assert fetched(f"{url}/healthz") == (200, "ok\n")
        assert fetched(f"{url}/secrets")[0] == 404
        assert running.end() == 0


def test_the_interval_has_its_jitter() -> None:
    from reconciler.loop import IntervalLoop
    from reconciler.report import PassReport

    waits: list[float] = []

    class Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            if len(waits) >= 200:
                self.set()
            return self.is_set()

    IntervalLoop(PassReport, 60.0, Stopping()).run()
    assert all(54 <= wait <= 66 for wait in waits)
    assert max(waits) - min(waits) > 6, "spread over the whole range"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_the_batch_under_way(
    dsn: str, conn: Connection, other_conn: Connection, tmp_path: Path, signum: int
) -> None:
    many_expired(conn, 12)
    conn.execute(
        "create function stand() returns trigger language plpgsql as $$ begin"
        " perform pg_advisory_xact_lock_shared(1); return null; end $$"
    )
    conn.execute("create trigger stand after insert on job_events execute function stand()")
    config = tmp_path / "config.yaml"
    config.write_text("database: {lockTimeoutMs: 25000}\nbatch: {size: 5}\n")
    other_conn.execute("begin; select pg_advisory_xact_lock(1)")
    with a_run(dsn, REAPER_CONFIG=str(config), REAPER_TABLES="jobs") as (running, _):
        wait_until(lambda: reapers_waiting(conn))
        running.process.send_signal(signum)
        running.next("stopping after the batch under way")
        other_conn.execute("commit")
        assert running.process.wait(60) == 0
        running.next("reaper stopped")
    assert by_status(conn) == {"queued": 5, "processing": 7}
    assert one_event_per_change(conn)
    assert count_of(conn, "select count(*) from reaper_state where until > now()") == 0, "turn given back"


def test_it_survives_a_restart_of_the_database() -> None:
    with EmbeddedPostgres() as server:
        migrate(server.dsn)
        with a_run(server.dsn) as (running, url):
            running.next("pass done")
            server.stop()
            running.next("pass done with errors")
            assert fetched(f"{url}/healthz")[0] == 200, "a failing pass is not a hung one"
            assert "reaper_table_ok" in fetched(f"{url}/metrics")[1]
            server.start()
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                job = a_job(conn)
                wait_until(lambda: the_job(conn, job)["status"] == "queued", timeout_sec=60)
                assert len(the_events(conn, job)) == 1
            assert running.end() == 0


def test_a_port_that_is_taken_is_said_with_exit_2(dsn: str) -> None:
    with a_run(dsn) as (running, url):
        port = url.rsplit(":", 1)[1]
        second = started(dsn, "run", REAPER_METRICS_PORT=port)
        _, stderr = second.communicate(timeout=60)
        assert second.returncode == 2
        assert "REAPER_METRICS_PORT" in stderr
        assert running.end() == 0


# ── inside an application ───────────────────────────────────────────────────────────────────────────


def test_a_reaper_inside_an_application_starts_stops_and_starts_again(dsn: str, conn: Connection) -> None:
    with a_reaper(dsn, REAPER_INTERVAL_SEC="0.1") as reaper:
        for _ in range(2):
            job = a_job(conn)
            reaper.start()
            with pytest.raises(RuntimeError, match="already running"):
                reaper.start()
            wait_until(lambda job=job: the_job(conn, job)["status"] == "queued")
            reaper.stop()
            assert not [thread for thread in threading.enumerate() if thread.name == "job-reaper"]
        left = a_job(conn)
    ours = (
        "select count(*) from pg_stat_activity"
        " where application_name = 'job-reaper' and datname = current_database()"
    )
    wait_until(lambda: count_of(conn, ours) == 0, "stop() closes the connection")
    assert the_job(conn, left)["status"] == "processing"


def test_two_instances_take_turns_and_every_job_is_told_once(dsn: str, conn: Connection) -> None:
    with (
        a_reaper(dsn, REAPER_INTERVAL_SEC="0.1", holder="one") as one,
        a_reaper(dsn, REAPER_INTERVAL_SEC="0.1", holder="two") as two,
    ):
        one.start()
        two.start()
        try:
            many_expired(conn, 50)
            wait_until(lambda: by_status(conn) == {"queued": 50})
        finally:
            one.stop()
            two.stop()
    assert count_of(conn, "select count(*) from job_events") == 50
