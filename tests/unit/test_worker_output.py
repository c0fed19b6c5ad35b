"""Scratch directories, storage, progress and the ffmpeg parser: files and arithmetic, no database."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.worker import (
    ArgumentError,
    Claim,
    EmptyOutputError,
    JobContext,
    JobError,
    JobTimeoutError,
    LeaseLostError,
    Progress,
    already_published,
    publish,
    run_command,
)
from reconciler.worker.output import FileStorage, S3Storage, Scratch, safe_name, sha256_of
from reconciler.worker.progress import FfmpegProgress, Throttle, parse_ffmpeg_progress


class Desk:
    """Stands in for a worker: remembers what a context asked of it."""

    def __init__(self, root: Path, *, held: bool = True) -> None:
        self.root = root
        self.held = held
        self.away = False
        self.events: list[tuple[str, dict[str, Any]]] = []

    def emit(self, job: JobContext, kind: str, details: Any, *, patient: bool = True) -> None:
        if self.away:
            raise psycopg.OperationalError("the server is away")
        self.events.append((kind, dict(details or {})))

    def assert_held(self, job: JobContext) -> None:
        if not self.held:
            raise LeaseLostError("jobs", 1, "w", 1)

    def set_stage(self, job: JobContext, stage: str, **options: Any) -> None:
        raise AssertionError("not asked for here")

    def row(self, job: JobContext) -> dict[str, Any]:
        return {}

    def scratch_root(self) -> Path:
        return self.root


def a_context(desk: Desk, job_id: Any = "j") -> JobContext:
    return JobContext(job_id, claim=Claim("jobs", job_id, "w", 2), services=desk)


# ── scratch ─────────────────────────────────────────────────────────────────────────────────────────


def test_scratch_directories_are_isolated_per_job_and_attempt(tmp_path: Path) -> None:
    one, two = Scratch.of(tmp_path, "a", 1), Scratch.of(tmp_path, "a", 2)
    other = Scratch.of(tmp_path, "b", 1)
    assert len({one.directory, two.directory, other.directory}) == 3
    assert one.work_file() == tmp_path / "jobs" / "a" / "1" / "a-work.mp4"
    assert stat.S_IMODE(one.directory.stat().st_mode) == 0o700
    one.remove()
    assert two.directory.exists()
    two.remove()
    assert not (tmp_path / "jobs" / "a").exists()


@given(st.text(min_size=1, max_size=60))
def test_no_job_id_leaves_the_scratch_root(job_id: str) -> None:
    try:
        name = safe_name(job_id)
    except (ArgumentError, UnicodeEncodeError):
        return
    assert os.sep not in name
    assert name.strip(".") != "" or "." not in name
    assert os.path.normpath(f"/root/{name}") == f"/root/{name}"


@given(st.text(max_size=20), st.text(max_size=20))
def test_different_jobs_never_share_a_name(one: str, two: str) -> None:
    try:
        names = safe_name(one), safe_name(two)
    except (ArgumentError, UnicodeEncodeError):
        return
    assert (names[0] == names[1]) == (one == two)


@pytest.mark.parametrize("job_id", [".", "..", "..."])
def test_a_name_of_dots_alone_does_not_climb(tmp_path: Path, job_id: str) -> None:
    scratch = Scratch.of(tmp_path, job_id, 1)
    assert scratch.directory.resolve() == scratch.directory
    assert scratch.directory.parent.parent == tmp_path / "jobs"


def test_jobs_of_two_tables_with_one_id_share_no_directory(tmp_path: Path) -> None:
    one = JobContext(7, claim=Claim("jobs", 7, "w", 1), services=Desk(tmp_path)).scratch()
    other = JobContext(7, claim=Claim("asr_jobs", 7, "w", 1), services=Desk(tmp_path)).scratch()
    assert one.directory == tmp_path / "jobs" / "7" / "1"
    assert other.directory == tmp_path / "asr_jobs" / "7" / "1"


def test_a_planted_link_is_refused(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    (root / "jobs").mkdir(parents=True)
    elsewhere.mkdir()
    (root / "jobs" / "j").symlink_to(elsewhere)
    with pytest.raises(ArgumentError, match="below the scratch root"):
        Scratch.of(root, "j", 1)


def test_the_work_file_is_renamed_to_final(tmp_path: Path) -> None:
    scratch = Scratch.of(tmp_path, "j", 1)
    scratch.work_file().write_bytes(b"clip")
    final = scratch.finalize()
    assert final.name == "j-final.mp4"
    assert not scratch.work_file().exists()


@pytest.mark.parametrize("content", [None, b""])
def test_a_missing_or_0_byte_work_file_is_damaged(tmp_path: Path, content: bytes | None) -> None:
    scratch = Scratch.of(tmp_path, "j", 1)
    if content is not None:
        scratch.work_file().write_bytes(content)
    with pytest.raises(EmptyOutputError):
        scratch.finalize()


# ── storage ─────────────────────────────────────────────────────────────────────────────────────────


class Bucket:
    """boto3's two calls, as far as S3Storage uses them."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}

    def head_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803 - boto3's names
        if Key not in self.objects:
            error = Exception("not found")
            error.response = {"Error": {"Code": "404"}}  # type: ignore[attr-defined]
            raise error
        return self.objects[Key]

    def upload_file(self, path: str, bucket: str, key: str, ExtraArgs: dict[str, Any]) -> None:  # noqa: N803
        self.objects[key] = {"ContentLength": Path(path).stat().st_size, **ExtraArgs}


@pytest.fixture(params=["files", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return FileStorage(tmp_path / "store") if request.param == "files" else S3Storage(Bucket(), "b", "p/")


def test_what_is_published_is_found_whole(tmp_path: Path, storage: Any) -> None:
    desk = Desk(tmp_path)
    file = tmp_path / "x"
    file.write_bytes(b"clip")
    assert not already_published(a_context(desk), storage, "a/j.mp4")
    publish(a_context(desk), storage, "a/j.mp4", file)
    found = storage.head("a/j.mp4")
    assert (found.size, found.sha256, found.whole) == (4, sha256_of(file), True)
    assert already_published(a_context(desk), storage, "a/j.mp4")
    assert [kind for kind, _ in desk.events] == ["uploaded", "uploaded", "done"]


def test_nothing_is_published_by_a_run_that_lost_its_lease(tmp_path: Path, storage: Any) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"clip")
    with pytest.raises(LeaseLostError):
        publish(a_context(Desk(tmp_path, held=False)), storage, "j.mp4", file)
    assert storage.head("j.mp4") is None


def test_a_run_that_loses_its_lease_while_copying_does_not_overwrite_its_heir(tmp_path: Path) -> None:
    """The zombie has hashed and copied when it asks; its heir has published meanwhile."""
    storage = FileStorage(tmp_path / "store")
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"zombie")
    new.write_bytes(b"heir")
    desk = Desk(tmp_path)

    class Slow(FileStorage):
        def _path(self, key: str) -> Path:  # the copy begins
            if desk.held:
                desk.held = False
                publish(a_context(Desk(tmp_path)), storage, "j.mp4", new)
            return super()._path(key)

    with pytest.raises(LeaseLostError):
        publish(a_context(desk), Slow(tmp_path / "store"), "j.mp4", old)
    assert (tmp_path / "store" / "j.mp4").read_bytes() == b"heir"
    found = storage.head("j.mp4")
    assert found is not None
    assert found.whole
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["j.mp4", "j.mp4.sha256"]


def test_an_empty_file_is_not_published(tmp_path: Path, storage: Any) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(EmptyOutputError):
        publish(a_context(Desk(tmp_path)), storage, "j.mp4", tmp_path / "x")
    assert storage.head("j.mp4") is None


def test_a_damaged_file_is_not_taken_for_published(tmp_path: Path) -> None:
    desk, storage = Desk(tmp_path), FileStorage(tmp_path / "store")
    file = tmp_path / "x"
    file.write_bytes(b"clip")
    publish(a_context(desk), storage, "j.mp4", file)
    (tmp_path / "store" / "j.mp4").write_bytes(b"cli")
    assert not already_published(a_context(desk), storage, "j.mp4")
    (tmp_path / "store" / "k.mp4").write_bytes(b"without a checksum")
    assert not already_published(a_context(desk), storage, "k.mp4")


@pytest.mark.parametrize("key", ["../x", "/etc/x", "a/../../x", "", "."])
def test_a_key_cannot_leave_the_storage_root(tmp_path: Path, key: str) -> None:
    with pytest.raises(ArgumentError, match="storage root"):
        FileStorage(tmp_path / "store").head(key)


def test_an_s3_error_other_than_not_found_is_no_absence() -> None:
    class Denied(Bucket):
        def head_object(self, **_: Any) -> dict[str, Any]:
            raise PermissionError("403")

    with pytest.raises(PermissionError):
        S3Storage(Denied(), "b").head("x")


# ── progress ────────────────────────────────────────────────────────────────────────────────────────


def test_progress_is_throttled_by_1_percent_or_500_ms() -> None:
    now = 0.0
    throttle = Throttle(clock=lambda: now)
    assert throttle.lets_through(0.0)
    assert not throttle.lets_through(0.9)
    assert throttle.lets_through(1.0)  # moved by 1 %
    now = 0.4
    assert not throttle.lets_through(1.5)
    now = 0.5
    assert throttle.lets_through(1.5)  # 500 ms have passed
    now = 9.0
    assert not throttle.lets_through(1.5)  # nothing new
    assert throttle.lets_through(100.0)


def test_a_thousand_reports_become_about_a_hundred_events(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    progress = Progress(a_context(desk), Throttle(clock=lambda: 0.0))
    for tenth in range(1001):
        progress.report(tenth / 10)
    assert 100 <= len(desk.events) <= 102
    assert desk.events[-1] == ("progress", {"percent": 100.0})


def test_reports_are_clamped_and_nonsense_is_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    progress = Progress(a_context(desk))
    progress.report(-5)
    progress.report(250)
    assert [details["percent"] for _, details in desk.events] == [0.0, 100.0]
    with pytest.raises(ArgumentError, match="percent=nan"):
        progress.report(float("nan"))


def test_a_report_of_a_cancelled_job_raises_its_reason(tmp_path: Path) -> None:
    job = a_context(Desk(tmp_path))
    job.cancel(JobTimeoutError())
    with pytest.raises(JobTimeoutError):
        Progress(job).report(1)


def test_progress_does_not_stop_the_work_when_the_database_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    desk.away = True
    assert not Progress(a_context(desk)).report(50)
    assert "progress not written" in caplog.text


FFMPEG = """frame=0
out_time_us=N/A
out_time=N/A
speed=N/A
progress=continue
frame=25
out_time_us=1000000
out_time_ms=1000000
out_time=00:00:01.000000
speed=2.5x
progress=continue
some noise without a sign
out_time=01:00:02.500000
progress=continue
out_time_us=-22
progress=continue
progress=end
"""


def test_the_ffmpeg_parser_reads_blocks() -> None:
    reports = list(parse_ffmpeg_progress(FFMPEG.splitlines()))
    assert reports == [
        FfmpegProgress(None, None, False),
        FfmpegProgress(1.0, 2.5, False),
        FfmpegProgress(3602.5, None, False),
        FfmpegProgress(0.0, None, False),
        FfmpegProgress(None, None, True),
    ]
    assert [report.percent(4.0) for report in reports] == [None, 25.0, 100.0, 0.0, 100.0]
    assert reports[1].percent(0) is None


@given(st.lists(st.text(max_size=30)))
def test_the_ffmpeg_parser_survives_any_text(lines: list[str]) -> None:
    for report in parse_ffmpeg_progress(lines):
        percent = report.percent(10)
        assert percent is None or 0 <= percent <= 100


# ── programs ────────────────────────────────────────────────────────────────────────────────────────


def test_a_programs_lines_are_handed_over_and_its_failure_is_told() -> None:
    lines: list[str] = []
    run_command(JobContext(1), [sys.executable, "-c", "print('a'); print('b')"], on_line=lines.append)
    assert lines == ["a\n", "b\n"]
    with pytest.raises(JobError, match=r"ended with 3: sorry") as raised:
        run_command(
            JobContext(1),
            [sys.executable, "-c", "import sys; sys.exit(print('sorry', file=sys.stderr) or 3)"], code="X",
        )  # fmt: skip
    assert raised.value.code == "X"


def test_a_program_and_what_it_started_end_with_the_job(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    job = JobContext(1)
    script = f"sleep 3600 & echo $! > {told}; trap '' TERM; wait; sleep 3600"

    def cancel_when_told(_: str) -> None:
        raise AssertionError("prints nothing")

    import threading

    def watch() -> None:
        while not told.exists() or not told.read_text().strip():
            time.sleep(0.01)
        job.cancel(LeaseLostError("jobs", 1, "w", 1))

    threading.Thread(target=watch, daemon=True).start()
    with pytest.raises(LeaseLostError):
        run_command(job, ["sh", "-c", script], on_line=cancel_when_told)
    child = int(told.read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the grandchild lives"
        time.sleep(0.01)


def test_a_program_that_ended_is_not_waited_for_because_of_what_it_left_behind(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    began = time.monotonic()
    run_command(JobContext(1), ["sh", "-c", f"sleep 8 & echo $! > {told}"])
    assert time.monotonic() - began < 5
    child = Path(f"/proc/{int(told.read_text())}")
    deadline = time.monotonic() + 2
    while child.exists() and child.joinpath("stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the grandchild lives"
        time.sleep(0.01)


def test_an_error_while_reading_lines_ends_the_program() -> None:
    def broken(_: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(
            JobContext(1), [sys.executable, "-uc", "print(1); import time; time.sleep(3600)"], on_line=broken
        )


# ── what an import costs ────────────────────────────────────────────────────────────────────────────


def test_importing_the_sdk_drags_in_neither_kubernetes_nor_the_metrics_endpoint() -> None:
    script = (
        "import sys, reconciler.worker as w; from reconciler.worker import Worker;"
        "print([m for m in ('kopf', 'kubernetes', 'prometheus_client', 'pydantic', 'yaml', 'click')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    import reconciler.worker as sdk

    for name in sdk.__all__:
        assert getattr(sdk, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        sdk.nonsense  # noqa: B018


def test_metrics_are_shown_to_prometheus_when_asked() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from reconciler.worker import metrics

    registry = CollectorRegistry()
    metrics.register(registry)
    metrics.RETRY_ATTEMPTS.add(1, code="UPSTREAM_FAILURE")
    text = generate_latest(registry).decode()
    for name in (
        "worker_heartbeats_total",
        "worker_heartbeat_failures_total",
        "worker_concurrent_jobs",
        "worker_acquire_conflicts_total",
    ):
        assert f"\n{name} " in text
    assert 'worker_retry_attempts_total{code="UPSTREAM_FAILURE"}' in text
    assert "# TYPE worker_recovered_jobs_total counter" in text
