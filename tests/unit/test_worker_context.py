"""Job context, identity and log lines: who works on what, with how much time left."""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from reconciler.worker import (
    ArgumentError,
    JobContext,
    JobTimeoutError,
    LeaseLostError,
    check_job_timeout,
    current_job,
    remaining,
    run_with_job_context,
    set_up_logging,
    timeout_for,
    with_stage,
    worker_identity,
)
from reconciler.worker.context import job_context
from reconciler.worker.identity import short_id
from reconciler.worker.logs import JsonFormatter, TextFormatter, redact

POD = {"POD_NAMESPACE": "media", "POD_NAME": "clip-0", "POD_UID": "1b2c"}


# ── time budget ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("agent", "minutes"),
    [("anything", 4), ("spelling-grammar", 6), ("simple-link-verifier", 8), ("fallacy-check", 10),
     ("multi-fallacy-eval", 15)],
)  # fmt: skip
def test_agent_timeouts_are_the_documents(agent: str, minutes: int) -> None:
    assert timeout_for(agent) == minutes * 60


def test_no_timeout_exceeds_twenty_minutes() -> None:
    assert timeout_for("long", {"long": 10**9}) == 20 * 60


def test_check_job_timeout_raises_once_the_deadline_has_passed() -> None:
    def work() -> None:
        job = current_job()
        assert job is not None
        check_job_timeout()
        job.limit(0)
        check_job_timeout()

    with pytest.raises(JobTimeoutError):
        run_with_job_context(work, job_id="abc", timeout_ms=60_000)


def test_a_call_gets_what_is_left_of_the_budget_but_never_more_than_its_cap() -> None:
    assert remaining() == 180
    assert run_with_job_context(remaining, job_id=1, timeout_ms=3_600_000) == 180
    assert 9 < run_with_job_context(remaining, job_id=1, timeout_ms=10_000) <= 10
    assert run_with_job_context(lambda: remaining(cap=None), job_id=1, timeout_ms=10**9) <= 20 * 60
    job = JobContext(1, limit_at=time.monotonic() - 5)
    assert job.remaining() == 0


def test_limit_only_shortens_a_budget() -> None:
    job = JobContext(1)
    job.limit(10)
    job.limit(1000)
    assert job.remaining() <= 10


def test_a_cancelled_job_raises_its_first_reason() -> None:
    job = JobContext(1)
    lost = LeaseLostError("jobs", 1, "w", 1)
    job.cancel(lost)
    job.cancel(JobTimeoutError())
    with job_context(job), pytest.raises(LeaseLostError):
        check_job_timeout()


def test_outside_a_job_nothing_times_out() -> None:
    assert current_job() is None
    check_job_timeout()


def test_the_context_travels_through_awaits_and_into_threads_and_not_beyond() -> None:
    seen: list[object] = []

    def look() -> None:
        job = current_job()
        seen.append(None if job is None else job.job_id)

    async def deep(name: str) -> None:
        with job_context(JobContext(name)):
            await asyncio.sleep(0)
            look()
            await asyncio.to_thread(look)

    async def both() -> None:
        await asyncio.gather(deep("a"), deep("b"))

    asyncio.run(both())
    with job_context(JobContext("c")):
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(look))
        thread.start()
        thread.join()
    look()
    assert sorted(filter(None, seen), key=str) == ["a", "a", "b", "b", "c"]
    assert seen[-1] is None


def test_a_coroutine_keeps_the_context_it_was_made_for() -> None:
    async def work() -> tuple[object, bool]:
        await asyncio.sleep(0)
        job = current_job()
        return (None if job is None else job.job_id), remaining(None) <= 60

    async def main() -> tuple[object, bool]:
        return await run_with_job_context(work, job_id="abc", timeout_ms=60_000)

    assert asyncio.run(main()) == ("abc", True)


@pytest.mark.parametrize(
    ("stage", "timeout", "seconds"),
    [("fallacy-check", None, 600.0), ("clip", 60.0, 60.0), ("clip", 10**6, 1200.0)],
)
def test_an_agent_has_the_documents_timeout_and_no_timeout_is_over_twenty_minutes(
    stage: str, timeout: float | None, seconds: float
) -> None:
    class Desk:
        def set_stage(self, job: JobContext, stage: str, **options: object) -> None: ...

    job = JobContext(1, services=Desk())  # type: ignore[arg-type]
    with job_context(job):
        with with_stage(stage, timeout=timeout):
            assert seconds - 5 < job.remaining(None) <= seconds
        assert job.remaining(None) == float("inf")


def test_a_stage_that_may_take_hours_has_no_timeout_unless_asked() -> None:
    class Desk:
        def set_stage(self, job: JobContext, stage: str, **options: object) -> None: ...

    job = JobContext(1, services=Desk())  # type: ignore[arg-type]
    with job_context(job), with_stage("asr"):
        assert job.remaining(None) == float("inf")


def test_a_context_without_a_worker_says_so() -> None:
    with pytest.raises(LookupError, match="belongs to no worker"):
        JobContext(1).emit("x")
    with pytest.raises(LookupError, match="inside a handler"), with_stage("clip"):
        pass


# ── identity ────────────────────────────────────────────────────────────────────────────────────────


def test_identity_from_the_downward_api() -> None:
    env = POD | {"CONTAINER_NAME": "worker", "CLUSTER_NAME": "eu-1"}
    assert worker_identity(env, boot_unix_ms=17) == "k8s://eu-1/media/clip-0/1b2c/worker#17"
    assert worker_identity(POD, boot_unix_ms=17) == "k8s:///media/clip-0/1b2c/#17"


def test_identity_outside_kubernetes_is_the_hosts() -> None:
    assert worker_identity({"HOSTNAME": "clip-0"}, boot_unix_ms=17).startswith("host://")
    assert worker_identity({}) == worker_identity({})


def test_half_a_downward_api_is_said_and_not_guessed(caplog: pytest.LogCaptureFixture) -> None:
    assert worker_identity({"POD_NAME": "clip-0"}).startswith("host://")
    assert "POD_NAMESPACE, POD_UID not set" in caplog.text


def test_identity_parts_cannot_forge_another_identity() -> None:
    with pytest.raises(ArgumentError, match="POD_NAME"):
        worker_identity(POD | {"POD_NAME": "a/b#1"})


def test_the_short_id_is_hostname_4_and_pid_4() -> None:
    assert short_id("hostname", 91234) == "host1234"
    assert short_id("vm", 7) == "vm0007"


# ── logs ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("AI").setLevel(logging.NOTSET)


def test_the_log_format_is_the_documents(stream: io.StringIO) -> None:
    set_up_logging(stream=stream, ai_level="info")
    with job_context(JobContext("abc-123")):
        logging.getLogger("AI").info("message %d", 1)
    logging.getLogger("app.upload").warning("idle", extra={"n": 2})
    in_job, outside = stream.getvalue().splitlines()
    stamp, _, rest = in_job.partition("] ")
    assert stamp.startswith("[20")
    assert stamp.endswith("Z")
    assert rest == f"[Worker {short_id()}] [Job abc-123] [AI] message 1"
    assert outside.endswith(f"[Worker {short_id()}] [upload] idle n=2")


def test_the_ai_tag_has_a_level_of_its_own(stream: io.StringIO) -> None:
    set_up_logging(stream=stream)
    logging.getLogger("AI").info("chatter")
    logging.getLogger("app").info("news")
    assert "chatter" not in stream.getvalue()
    assert "news" in stream.getvalue()


def test_ai_log_level_is_read_from_the_environment(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AI_LOG_LEVEL", "info")
    set_up_logging(stream=stream)
    logging.getLogger("AI").info("chatter")
    assert "chatter" in stream.getvalue()


def test_json_lines_carry_the_same(stream: io.StringIO) -> None:
    set_up_logging(form="json", stream=stream, scratch_root="/scratch")
    with job_context(JobContext("abc")):
        try:
            raise ValueError("in /home/me/secret.txt")
        except ValueError:
            logging.getLogger("app").exception("broke", extra={"file": "/scratch/jobs/1/x.mp4"})
    line = json.loads(stream.getvalue())
    assert (line["job_id"], line["tag"], line["level"]) == ("abc", "app", "error")
    assert line["file"] == "<scratch>/jobs/1/x.mp4"
    assert "/home/me" not in stream.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot read /etc/passwd", "cannot read <path>"),
        ("'/srv/a/b.mp4': no such file", "'<path>': no such file"),
        ("in /scratch/jobs/7/w.mp4", "in <scratch>/jobs/7/w.mp4"),
        ("in /scratch2/x", "in <path>"),
        ("file:///srv/a", "<path>"),
        ("https://host/path stays", "https://host/path stays"),
        ("3/4 and a/b stay", "3/4 and a/b stay"),
        ("error:/etc/passwd", "error:<path>"),
        ("ENOENT: /srv/x: gone", "ENOENT: <path>: gone"),
        ("in /home/me/My Files/secret.txt", "in <path>"),
        ("open('/home/me/a secret')", "open('<path>')"),
        ('"/home/me/my secret"', '"<path>"'),
        ("//srv//a/b(1)/c", "<path>"),
        ("https://host:8080/a and s3://bucket/key stay", "https://host:8080/a and s3://bucket/key stay"),
    ],
)
def test_logs_do_not_expose_file_paths_outside_the_scratch_root(text: str, shown: str) -> None:
    assert redact(text, "/scratch") == shown


def test_formatters_survive_a_record_without_a_job() -> None:
    record = logging.makeLogRecord({"msg": "x", "name": "a.b"})
    assert TextFormatter().format(record).endswith("[b] x")
    assert json.loads(JsonFormatter().format(record))["message"] == "x"
