"""Idempotent output, the example worker with a real ffmpeg, and periodic tasks across a fleet."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reconciler.worker import Worker, already_published, publish
from reconciler.worker.output import FileStorage
from reconciler.worker.periodic import Periodic
from tests.factories import a_queued_job, the_events, the_job
from tests.postgres import Connection
from tests.worker_fleet import eventually, missing_program, one, running, status_of
from tests.worker_settings import a_fast_sdk

STATE = """create table if not exists reaper_state (
    scope text primary key, holder text, until timestamptz, last_success_at timestamptz,
    resumed_at timestamptz, counters jsonb not null default '{}',
    updated_at timestamptz not null default now())"""


def a_worker(dsn: str, handler: Any, **options: Any) -> Worker:
    defaults: dict[str, Any] = {"sdk": a_fast_sdk(), "poll_sec": 0.1}
    return Worker(dsn, {"jobs": handler}, **(defaults | options))


def test_idempotency_rerun_job_with_existing_final_artifact_skips_processing(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    storage = FileStorage(tmp_path / "store")
    job_id = a_queued_job(conn)
    worked: list[int] = []

    def clip(job: Any) -> None:
        if already_published(job, storage, f"{job.job_id}.mp4"):
            return
        worked.append(job.attempt)
        scratch = job.scratch()
        scratch.work_file().write_bytes(b"clip")
        publish(job, storage, f"{job.job_id}.mp4", scratch.finalize())

    with running(a_worker(dsn, clip, scratch_dir=tmp_path / "scratch")):
        eventually(lambda: status_of(conn, job_id) == "done")
        conn.execute("update jobs set status = 'queued'")
        eventually(lambda: the_job(conn, job_id)["attempt_count"] == 2)
        eventually(lambda: status_of(conn, job_id) == "done")
    assert worked == [1]
    events = the_events(conn, job_id)
    assert [event["type"] for event in events] == ["uploaded", "uploaded", "done"]
    assert [event["details"].get("skipped") for event in events] == [False, True, True]


def test_a_zombie_publishes_nothing(dsn: str, conn: Connection, tmp_path: Path) -> None:
    storage = FileStorage(tmp_path / "store")
    job_id = a_queued_job(conn)
    ended: list[BaseException | None] = []

    def clip(job: Any) -> None:
        scratch = job.scratch()
        scratch.work_file().write_bytes(b"clip")
        # The lease is lost while the work is done, and no beat has told yet.
        conn.execute("update jobs set attempt_count = attempt_count + 1, locked_by = 'another'")
        try:
            publish(job, storage, "x.mp4", scratch.finalize())
        except BaseException as error:
            ended.append(error)
            raise

    with running(
        a_worker(dsn, clip, scratch_dir=tmp_path / "scratch", sdk=a_fast_sdk(lease_sec=60, beat_sec=15))
    ):
        eventually(lambda: ended)
    assert type(ended[0]).__name__ == "LeaseLostError"
    assert storage.head("x.mp4") is None
    assert the_job(conn, job_id)["locked_by"] == "another"


@pytest.mark.parametrize("with_ffmpeg", [True, False])
def test_the_example_worker_cuts_a_clip(
    dsn: str, conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_ffmpeg: bool
) -> None:
    if with_ffmpeg and shutil.which("ffmpeg") is None:
        missing_program("ffmpeg")
    monkeypatch.setenv("CLIP_STORAGE", str(tmp_path / "clips"))
    spec = importlib.util.spec_from_file_location("clip_worker", "examples/clip_worker.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if not with_ffmpeg:
        monkeypatch.setattr(example, "FFMPEG", None)
    conn.execute("alter table jobs add column payload jsonb")
    good = a_queued_job(conn, payload='{"duration": 1.0}')
    bad = a_queued_job(conn, payload='{"duration": -1}')
    with running(a_worker(dsn, example.clip, scratch_dir=tmp_path / "scratch", sdk=a_fast_sdk(lease_sec=30))):
        eventually(lambda: status_of(conn, good) == "done")
        eventually(lambda: status_of(conn, bad) == "failed")
    kinds = [event["type"] for event in the_events(conn, good)]
    assert kinds[-1] == "uploaded"
    assert "progress" in kinds
    row = the_job(conn, good)
    assert (row["stage"], row["expected_duration_ms"]) == ("upload", 1000)
    assert the_job(conn, bad)["fail_code"] == "VALIDATION"
    assert (tmp_path / "clips" / f"{good}.mp4").stat().st_size > 0
    assert list((tmp_path / "scratch" / "jobs").glob("*")) == []


def test_the_notify_trigger_of_the_examples_wakes_a_worker(dsn: str, conn: Connection) -> None:
    conn.execute(Path("examples/notify.sql").read_bytes())
    with running(a_worker(dsn, lambda job: None, poll_sec=3600)):
        eventually(lambda: one(conn, "select count(*) from pg_stat_activity where query like 'LISTEN%%'"))
        job = a_queued_job(conn)
        eventually(lambda: status_of(conn, job) == "done", timeout=10)


# ── periodic tasks ──────────────────────────────────────────────────────────────────────────────────


class Overlap:
    """Counts runs, and how many there were at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.runs = self.now = self.most = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self.runs += 1
            self.now += 1
            self.most = max(self.most, self.now)

    def end(self) -> None:
        with self._lock:
            self.now -= 1

    def __call__(self) -> None:
        self.begin()
        time.sleep(self.seconds)
        self.end()


def test_an_exclusive_task_never_runs_twice_at_once_across_the_fleet(dsn: str, conn: Connection) -> None:
    conn.execute(STATE)
    task = Overlap(0.15)
    with ExitStack() as fleet:
        for number in range(4):
            worker = a_worker(dsn, lambda job: None, worker_id=f"w{number}")
            worker.every(0.1, task, name="costs")
            fleet.enter_context(running(worker))
        eventually(lambda: task.runs >= 6)
    assert task.most == 1
    holder, success = conn.execute(
        "select holder, last_success_at is not null from reaper_state where scope = 'periodic:costs'"
    ).fetchone() or (None, None)
    assert holder in {"w0", "w1", "w2", "w3"}
    assert success


def test_an_exclusive_task_starts_once_per_interval_in_the_whole_fleet(dsn: str, conn: Connection) -> None:
    conn.execute(STATE)
    task = Overlap(0)
    began = time.monotonic()
    with ExitStack() as fleet:
        for number in range(4):
            worker = a_worker(dsn, lambda job: None, worker_id=f"w{number}")
            worker.every(1.0, task, name="costs")
            fleet.enter_context(running(worker))
        eventually(lambda: task.runs >= 3)
    assert task.runs <= (time.monotonic() - began) / 0.9 + 1


def test_a_task_that_is_not_exclusive_runs_on_every_worker(dsn: str, conn: Connection) -> None:
    seen: set[str] = set()
    with ExitStack() as fleet:
        for name in ("w0", "w1"):
            worker = a_worker(dsn, lambda job: None, worker_id=name)
            worker.every(0.1, lambda name=name: seen.add(name), exclusive=False, name="local")  # type: ignore[misc]
            fleet.enter_context(running(worker))
        eventually(lambda: seen == {"w0", "w1"})


def test_a_dead_holders_task_is_taken_over_when_its_time_has_passed(dsn: str, conn: Connection) -> None:
    conn.execute(STATE)
    conn.execute(
        "insert into reaper_state (scope, holder, until) values"
        " ('periodic:costs', 'dead', now() + interval '1.5 s')"
    )
    task = Overlap(0)
    worker = a_worker(dsn, lambda job: None, worker_id="heir")
    worker.every(0.2, task, name="costs")
    with running(worker):
        eventually(lambda: task.runs)
        assert one(conn, "select clock_timestamp() >= until or holder = 'heir' from reaper_state")


def test_a_failing_task_runs_again_and_is_no_success(dsn: str, conn: Connection) -> None:
    conn.execute(STATE)
    runs: list[int] = []

    async def task() -> None:
        runs.append(1)
        raise ValueError("no")

    worker = a_worker(dsn, lambda job: None)
    worker.every(0.1, task, name="costs")
    with running(worker):
        eventually(lambda: len(runs) >= 3)
    assert one(conn, "select last_success_at is null from reaper_state where scope = 'periodic:costs'")


def test_a_long_task_is_renewed_and_one_that_lost_its_row_is_stopped(dsn: str, conn: Connection) -> None:
    conn.execute(STATE)
    stopped = asyncio.Event()

    async def task() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            stopped.set()
            raise

    periodic = Periodic(
        "long", 60, task, exclusive=True, dsn=dsn, worker_id="w", state=("reaper_state",), ttl_sec=0.6
    )

    async def scene() -> None:
        stopping = asyncio.Event()
        running_task = asyncio.create_task(periodic.run(stopping))
        until = "select until from reaper_state where scope = 'periodic:long'"
        first = None
        while first is None:
            await asyncio.sleep(0.01)
            first = one(conn, until)
        while one(conn, until) == first:
            await asyncio.sleep(0.01)
        assert not stopped.is_set()
        conn.execute("update reaper_state set holder = 'thief'")
        await asyncio.wait_for(stopped.wait(), 10)
        stopping.set()
        await asyncio.wait_for(running_task, 10)

    asyncio.run(scene())
    assert one(conn, "select holder from reaper_state where scope = 'periodic:long'") == "thief"


def test_without_the_state_table_an_exclusive_task_waits_and_says_so(
    dsn: str, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    conn.execute("drop table if exists reaper_state")
    task = Overlap(0)
    worker = a_worker(dsn, lambda job: None)
    worker.every(0.1, task, name="costs")
    with running(worker):
        eventually(lambda: "periodic task waits for the database" in caplog.text)
        assert task.runs == 0
        with psycopg.connect(dsn, autocommit=True) as own:
            own.execute(STATE)
        eventually(lambda: task.runs)
