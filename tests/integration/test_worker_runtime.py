"""The runtime in this process: dispatch, the cap, retries, budgets, stages, the self-fence."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any

import psycopg
import pytest

from reconciler.worker import (
    ArgumentError,
    EmptyOutputError,
    JobContext,
    JobError,
    JobTimeoutError,
    LeaseLostError,
    Worker,
    check_job_timeout,
    with_stage,
)
from reconciler.worker import metrics as counted
from reconciler.worker.session import Sessions
from tests.factories import a_queued_job, the_events, the_job
from tests.postgres import Connection
from tests.worker_fleet import eventually, one, running, status_of
from tests.worker_settings import a_fast_sdk


def a_worker(dsn: str, handler: Any, **options: Any) -> Worker:
    defaults: dict[str, Any] = {"sdk": a_fast_sdk(), "poll_sec": 0.1, "worker_id": "worker-1"}
    handlers = handler if isinstance(handler, dict) else {"jobs": handler}
    return Worker(dsn, handlers, **(defaults | options))


def all_are(conn: Connection, status: str) -> Any:
    return lambda: one(conn, "select bool_and(status = %s) from jobs", status)


# ── handlers ────────────────────────────────────────────────────────────────────────────────────────


def test_async_and_plain_handlers_run_jobs_of_both_tables(dsn: str, conn: Connection) -> None:
    jobs = [a_queued_job(conn, stage="clip") for _ in range(3)]
    asr = [a_queued_job(conn, "asr_jobs") for _ in range(3)]
    seen: list[tuple[str, Any]] = []

    def clip(job: JobContext) -> None:
        seen.append(("clip", job.job_id))

    async def transcribe(job: JobContext) -> None:
        await asyncio.sleep(0)
        seen.append(("asr", job.job_id))

    with running(a_worker(dsn, {"jobs:clip": clip, "asr_jobs": transcribe})):
        eventually(lambda: len(seen) == 6)
        eventually(lambda: one(conn, "select bool_and(status = 'done') from jobs"))
        eventually(lambda: one(conn, "select bool_and(status = 'done') from asr_jobs"))
    assert {("clip", job) for job in jobs} | {("asr", job) for job in asr} == set(seen)


def test_jobs_without_a_handler_are_left_to_others(dsn: str, conn: Connection) -> None:
    clip = a_queued_job(conn, stage="clip")
    burnin = a_queued_job(conn, stage="burnin")
    with running(a_worker(dsn, {"jobs:clip": lambda job: None})):
        eventually(lambda: status_of(conn, clip) == "done")
    assert status_of(conn, burnin) == "queued"


def test_concurrency_more_inflight_requests_than_max_concurrency_never_exceed_the_cap(
    dsn: str, conn: Connection
) -> None:
    for _ in range(30):
        a_queued_job(conn)
    lock = threading.Lock()
    now = most = 0

    def handle(job: JobContext) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        claimed = one(conn, "select count(*) from jobs where status = 'processing'")
        assert claimed <= 4
        time.sleep(0.02)
        with lock:
            now -= 1

    with running(a_worker(dsn, handle, concurrency=4)):
        eventually(all_are(conn, "done"))
    assert most == 4


def test_a_notification_wakes_an_idle_worker_long_before_it_polls(dsn: str, conn: Connection) -> None:
    with running(a_worker(dsn, lambda job: None, poll_sec=3600)):
        eventually(lambda: one(conn, "select count(*) from pg_stat_activity where query like 'LISTEN%'"))
        # Listening wakes it once by itself: wait until that is over and it sleeps for an hour.
        idle = (
            "select bool_and(state_change < clock_timestamp() - interval '1 s') from pg_stat_activity"
            " where application_name = 'job-reaper claim' and state = 'idle'"
        )
        eventually(lambda: one(conn, idle))
        job = a_queued_job(conn)
        conn.execute("notify job_reaper_queued")
        eventually(lambda: status_of(conn, job) == "done", timeout=10)


def test_without_listening_the_worker_polls(dsn: str, conn: Connection) -> None:
    with running(a_worker(dsn, lambda job: None, listen=None)):
        job = a_queued_job(conn)
        eventually(lambda: status_of(conn, job) == "done")


def test_a_handler_reads_its_row_and_writes_events(dsn: str, conn: Connection) -> None:
    conn.execute("alter table jobs add column payload jsonb")
    job_id = a_queued_job(conn, payload='{"url": "x"}')
    rows: list[Any] = []

    def handle(job: JobContext) -> None:
        rows.append(job.row()["payload"])
        job.emit("resolved", {"url": "x"})

    with running(a_worker(dsn, handle)):
        eventually(all_are(conn, "done"))
    assert rows == [{"url": "x"}]
    (event,) = the_events(conn, job_id)
    assert event["type"] == "resolved"
    assert event["table"] == "jobs"
    assert event["details"]["url"] == "x"
    assert event["details"]["attempt"] == 1


def test_a_claim_that_comes_back_after_the_signal_is_given_back_unharmed(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    ran: list[Any] = []
    worker = a_worker(dsn, lambda job: ran.append(job.job_id), listen=None)
    waiting = (
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like 'WITH picked%'"
    )
    job = a_queued_job(conn)
    other_conn.execute("begin")
    other_conn.execute("lock table jobs in share mode")  # readers see, writers wait
    with running(worker):
        eventually(lambda: one(conn, waiting))
        worker.stop()
        eventually(worker.is_stopping)
        other_conn.execute("rollback")
    row = the_job(conn, job)
    assert (row["status"], row["attempt_count"], row["attempts_refunded"]) == ("queued", 1, 1)
    assert ran == []


# ── requirement 4 and the lease ─────────────────────────────────────────────────────────────────────


def test_requirement_4_a_working_job_is_beaten_and_outlives_many_leases(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn)
    let_go = threading.Event()
    expired = []
    with running(a_worker(dsn, lambda _: let_go.wait(60), sdk=a_fast_sdk(lease_sec=1))):
        eventually(lambda: status_of(conn, job) == "processing")
        first = the_job(conn, job)

        def beaten_often() -> bool:
            row = the_job(conn, job)
            expired.append(one(conn, "select lease_expires_at < clock_timestamp() from jobs"))
            return bool((row["last_heartbeat_at"] - first["last_heartbeat_at"]).total_seconds() > 3)

        eventually(beaten_often)
        let_go.set()
        eventually(lambda: status_of(conn, job) == "done")
    assert not any(expired)


def test_requirement_4_an_async_handler_that_blocks_the_loop_is_beaten_all_the_same(
    dsn: str, conn: Connection
) -> None:
    job = a_queued_job(conn)

    async def handle(_: JobContext) -> None:
        until = time.monotonic() + 4
        while time.monotonic() < until:  # pure Python, no await
            pass

    before = counted.LEASES_LOST.value(reason="self_fenced")
    expired = []
    with running(a_worker(dsn, handle, sdk=a_fast_sdk(lease_sec=2))):
        eventually(lambda: status_of(conn, job) == "processing")

        def done() -> bool:
            expired.append(
                one(conn, "select coalesce(lease_expires_at < clock_timestamp(), false) from jobs")
            )
            return bool(status_of(conn, job) == "done")

        eventually(done)
    assert not any(expired)
    assert counted.LEASES_LOST.value(reason="self_fenced") == before


def test_requirement_3_with_stage_sets_the_stage_and_its_lease(dsn: str, conn: Connection) -> None:
    a_queued_job(conn, expected_ms=100_000)
    leases: list[tuple[Any, ...]] = []

    def look() -> None:
        row = conn.execute(
            "select stage, extract(epoch from lease_expires_at - last_heartbeat_at)::int from jobs"
        ).fetchone()
        assert row is not None
        leases.append(row)

    @with_stage("asr", timeout=60)
    async def transcribe() -> None:
        look()

    async def handle(job: JobContext) -> None:
        async with with_stage("clip"):
            look()
        await transcribe()
        with with_stage("finalize") as same:
            assert same is job
            look()

    with running(a_worker(dsn, handle)):
        eventually(all_are(conn, "done"))
    assert leases == [("clip", 600), ("asr", 1200), ("finalize", 3)]


def test_the_loser_of_a_fence_gets_its_job_cancelled_and_changes_nothing(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn)
    stopped: list[BaseException | None] = []
    before = counted.LEASES_LOST.value(reason="fenced")

    def handle(context: JobContext) -> None:
        context.cancelled.wait(30)
        stopped.append(context.reason)

    with running(a_worker(dsn, handle)):
        eventually(lambda: status_of(conn, job) == "processing")
        conn.execute("update jobs set locked_by = 'worker-2', attempt_count = 2")
        eventually(lambda: stopped)
        row = the_job(conn, job)
    assert isinstance(stopped[0], LeaseLostError)
    assert (row["status"], row["locked_by"], row["attempt_count"]) == ("processing", "worker-2", 2)
    assert counted.LEASES_LOST.value(reason="fenced") == before + 1


def test_an_async_handler_is_cancelled_when_its_lease_is_lost(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn)
    cancelled: list[bool] = []

    async def handle(_: JobContext) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with running(a_worker(dsn, handle)):
        eventually(lambda: status_of(conn, job) == "processing")
        conn.execute("update jobs set status = 'queued', locked_by = null, next_earliest_run_at = 'infinity'")
        eventually(lambda: cancelled)
    assert status_of(conn, job) == "queued"


def test_a_row_locked_by_the_app_is_beaten_singly_and_the_others_go_on(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    locked, free = a_queued_job(conn), a_queued_job(conn)
    let_go = threading.Event()
    with running(a_worker(dsn, lambda _: let_go.wait(60), sdk=a_fast_sdk(lease_sec=6))):
        eventually(lambda: one(conn, "select bool_and(status = 'processing') from jobs"))
        with other_conn.transaction():
            other_conn.execute("select from jobs where id = %s for update", (locked,))
            before = the_job(conn, free)["last_heartbeat_at"]
            waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
            eventually(lambda: one(conn, waiting) == 1, "one waiter stands in the row's queue")
            eventually(lambda: the_job(conn, free)["last_heartbeat_at"] > before)
            stale = the_job(conn, locked)["last_heartbeat_at"]
        eventually(lambda: the_job(conn, locked)["last_heartbeat_at"] > stale)
        let_go.set()
        eventually(all_are(conn, "done"))


def test_a_row_that_refuses_its_beat_does_not_stop_the_beats_of_the_others(
    dsn: str, conn: Connection
) -> None:
    jobs = [a_queued_job(conn) for _ in range(5)]
    conn.execute(
        "create function no() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;"
        "create trigger t before update on jobs for each row"
        f" when (old.status = 'processing' and new.status = 'processing' and old.id = '{jobs[2]}')"
        " execute function no()"
    )
    let_go = threading.Event()
    with running(a_worker(dsn, lambda _: let_go.wait(60), sdk=a_fast_sdk(lease_sec=6))):
        eventually(lambda: one(conn, "select bool_and(status = 'processing') from jobs"))
        beaten = "select count(*) from jobs where last_heartbeat_at > processing_started_at"
        eventually(lambda: one(conn, beaten) == 4)
        let_go.set()
        eventually(all_are(conn, "done"))


def test_a_table_with_columns_that_cannot_be_null_is_beaten(dsn: str, conn: Connection) -> None:
    """A domain that forbids NULL: ids that are text are then beaten one by one, not never."""
    conn.execute(
        "create domain tenant as text not null default 'a';"
        "alter table jobs alter id drop default, alter id type text, add column owner tenant"
    )
    jobs = [a_queued_job(conn, id=f"job {number}") for number in range(3)]
    let_go = threading.Event()
    with running(a_worker(dsn, lambda _: let_go.wait(60), sdk=a_fast_sdk(lease_sec=3))):
        eventually(
            lambda: (
                one(conn, "select count(*) from jobs where last_heartbeat_at > processing_started_at") == 3
            )
        )
        let_go.set()
        for job in jobs:
            eventually(lambda job=job: status_of(conn, job) == "done")  # type: ignore[misc]


def test_a_job_past_max_runtime_is_cancelled_and_no_longer_beaten(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn)
    let_go = threading.Event()
    with running(a_worker(dsn, lambda _: let_go.wait(60), max_runtime=1.0, sdk=a_fast_sdk(lease_sec=2))):
        # The handler is wedged: it does not look at its context. The lease must run out all the same.
        eventually(lambda: one(conn, "select lease_expires_at < clock_timestamp() from jobs"), timeout=15)
        assert status_of(conn, job) == "processing"
        let_go.set()
        eventually(lambda: status_of(conn, job) == "failed")
    assert the_job(conn, job)["fail_code"] == "JOB_TIMEOUT"


def test_max_runtime_by_stage_fails_a_listening_handler_at_once(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn, stage="clip")

    async def handle(_: JobContext) -> None:
        await asyncio.sleep(3600)

    with running(a_worker(dsn, handle, max_runtime={"clip": 0.3})):
        eventually(lambda: status_of(conn, job) == "failed", timeout=10)
    assert the_job(conn, job)["fail_code"] == "JOB_TIMEOUT"


def test_a_stage_past_its_time_fails_the_job_without_a_retry(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn)

    async def handle(_: JobContext) -> None:
        async with with_stage("resolve", timeout=0.2):
            await asyncio.sleep(3600)

    with running(a_worker(dsn, handle)):
        eventually(lambda: status_of(conn, job) == "failed", timeout=10)
    row = the_job(conn, job)
    assert (row["fail_code"], row["attempt_count"]) == ("JOB_TIMEOUT", 1)


# ── retries ─────────────────────────────────────────────────────────────────────────────────────────


def test_upload_transient_error_is_retried_until_max_attempts(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn, max_attempts=3)
    runs = itertools.count(1)
    before = counted.RETRY_ATTEMPTS.value(code="STORAGE_UPLOAD_FAILED")

    def handle(_: JobContext) -> None:
        next(runs)
        raise JobError("STORAGE_UPLOAD_FAILED", "503 from the bucket")

    with running(a_worker(dsn, handle)):
        eventually(lambda: status_of(conn, job) == "failed")
    row = the_job(conn, job)
    assert (row["attempt_count"], row["fail_code"]) == (3, "STORAGE_UPLOAD_FAILED")
    assert next(runs) == 4
    assert counted.RETRY_ATTEMPTS.value(code="STORAGE_UPLOAD_FAILED") == before + 3


def test_ffmpeg_hard_failure_is_marked_failed_at_once(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn)

    def handle(_: JobContext) -> None:
        raise JobError("FFMPEG_FAILED", "moov atom not found in /etc/secret/input.mp4")

    with running(a_worker(dsn, handle)):
        eventually(lambda: status_of(conn, job) == "failed")
    row = the_job(conn, job)
    assert (row["attempt_count"], row["fail_code"]) == (1, "FFMPEG_FAILED")
    assert "/etc" not in row["fail_reason"]


def test_data_corruption_0_byte_output_is_requeued(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn)

    def handle(context: JobContext) -> None:
        if context.attempt == 1:
            context.scratch().work_file().touch()
            context.scratch().finalize()

    with running(a_worker(dsn, handle)):
        eventually(lambda: status_of(conn, job) == "done")
    assert the_job(conn, job)["attempt_count"] == 2
    assert EmptyOutputError.code == "EMPTY_OUTPUT"


def test_a_job_timeout_error_is_not_retried(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn)

    def handle(context: JobContext) -> None:
        context.limit(0)
        check_job_timeout()

    with running(a_worker(dsn, handle)):
        eventually(lambda: status_of(conn, job) == "failed")
    assert the_job(conn, job)["fail_code"] == JobTimeoutError.code


class Unprintable(Exception):  # noqa: N818 - odd on purpose
    def __str__(self) -> str:
        raise RuntimeError("not even a message")


ODD_ERRORS = [
    SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(7), StopAsyncIteration(),
    asyncio.CancelledError(), MemoryError(), ValueError("a\x00b"), ValueError("x" * 10**6),
    ExceptionGroup("many", [ValueError(), ConnectionError()]), Unprintable(), ValueError("\ud800"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["async", "plain"])
@pytest.mark.parametrize("error", ODD_ERRORS, ids=lambda error: type(error).__name__)
def test_a_handler_that_raises_odd_things_leaves_its_job_failed_and_the_worker_alive(
    dsn: str, conn: Connection, error: BaseException, kind: str
) -> None:
    odd = a_queued_job(conn, stage="odd")

    def plain(job: JobContext) -> None:
        if job.stage == "odd":
            raise error

    async def on_loop(job: JobContext) -> None:
        plain(job)

    with running(a_worker(dsn, plain if kind == "plain" else on_loop)):
        eventually(lambda: status_of(conn, odd) == "failed")
        after = a_queued_job(conn)
        eventually(lambda: status_of(conn, after) == "done")
    assert the_job(conn, odd)["fail_code"]


def test_a_payload_that_is_not_jsonable_is_a_clear_error_and_fails_the_job(
    dsn: str, conn: Connection
) -> None:
    job = a_queued_job(conn)
    errors: list[str] = []

    def handle(context: JobContext) -> None:
        try:
            context.emit("progress", {"when": object()})
        except ArgumentError as error:
            errors.append(str(error))
            raise

    with running(a_worker(dsn, handle)):
        eventually(lambda: status_of(conn, job) == "failed")
    assert "not JSON serializable" in errors[0]
    assert the_job(conn, job)["fail_code"] == "VALIDATION"


def test_an_ending_whose_answer_was_lost_is_recognised_as_ours(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = a_queued_job(conn)
    answers: list[Any] = []
    run = Sessions.run

    def lose_the_first_answer(sessions: Sessions, work: Any) -> Any:
        answers.append(run(sessions, work))
        if len(answers) == 1:
            raise psycopg.OperationalError("connection lost after the commit")
        return answers[-1]

    monkeypatch.setattr(Sessions, "run", lose_the_first_answer)
    caplog.set_level("INFO")
    with running(a_worker(dsn, lambda _: None)):
        eventually(lambda: any(getattr(record, "became", "") for record in caplog.records))
    assert [record.became for record in caplog.records if hasattr(record, "became")] == [
        "ended, though the answer was lost"
    ]
    assert status_of(conn, job) == "done"


def test_an_ending_the_row_refuses_leaves_the_job_to_its_lease(dsn: str, conn: Connection) -> None:
    conn.execute(
        "create function no() returns trigger language plpgsql as $$ begin"
        " if new.status = 'done' then raise 'not today'; end if; return new; end $$;"
        "create trigger t before update on jobs for each row execute function no()"
    )
    job = a_queued_job(conn)
    with running(a_worker(dsn, lambda _: None)):
        eventually(lambda: one(conn, "select lease_expires_at < clock_timestamp() from jobs"))
    assert status_of(conn, job) == "processing"


# ── what cannot be ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("handlers", "options", "says"),
    [
        ({}, {}, "handlers={}"),
        ({"nope": lambda job: None}, {}, "table='nope'"),
        ({"jobs:": lambda job: None}, {}, "stage=''"),
        ({"jobs": 7}, {}, "a function that takes a JobContext"),
        ({"jobs": lambda job: None}, {"concurrency": 0}, "concurrency=0"),
        ({"jobs": lambda job: None}, {"poll_sec": 0}, "poll_sec=0"),
        ({"jobs": lambda job: None}, {"heartbeat": "never"}, "thread or process"),
        ({"jobs": lambda job: None}, {"on_shutdown": "hide"}, "end_lease or release"),
    ],
)
def test_a_worker_that_cannot_be_is_refused_by_name(
    dsn: str, handlers: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ArgumentError, match=says):
        a_worker(dsn, handlers, **options)
