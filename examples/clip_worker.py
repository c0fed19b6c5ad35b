"""A whole worker: cuts a clip with ffmpeg, publishes it once, survives everything job-reaper tests.

    DATABASE_URL=postgresql://… python examples/clip_worker.py

The app's row may carry its input in a column `payload` (jsonb):
`{"input": "/media/in.mp4", "start": 3.0, "duration": 10.0}`; without one a test picture is made. Where ffmpeg
is not installed the same steps run with a file of plain bytes, so that the example works anywhere.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from reconciler.worker import (
    JobContext,
    JobError,
    Progress,
    Worker,
    already_published,
    publish,
    run_command,
    set_up_logging,
    with_stage,
)
from reconciler.worker.output import FileStorage
from reconciler.worker.progress import parse_ffmpeg_progress

STORAGE = FileStorage(os.environ.get("CLIP_STORAGE", "./clips"))
FFMPEG = shutil.which("ffmpeg")


def clip(job: JobContext) -> None:
    """Make `<job id>.mp4`. Safe to run again: a clip that is there and whole is not made twice."""
    key = f"{job.job_id}.mp4"
    if already_published(job, STORAGE, key):
        return
    scratch = job.scratch()
    try:
        with with_stage("resolve"):
            wanted = resolve(job)
        with with_stage("clip", expected_duration_ms=int(wanted["duration"] * 1000)):
            cut(job, wanted, scratch.work_file())
            final = scratch.finalize()
        with with_stage("upload"):
            publish(job, STORAGE, key, final)
    finally:
        scratch.remove()


def resolve(job: JobContext) -> dict[str, Any]:
    """What to cut. A payload that cannot be is the job's fault: fatal, no retry."""
    payload = job.row().get("payload") or {}
    wanted = {
        "input": payload.get("input"),
        "start": payload.get("start", 0.0),
        "duration": payload.get("duration", 2.0),
    }
    if not isinstance(wanted["duration"], int | float) or not 0 < wanted["duration"] <= 3600:
        raise JobError("VALIDATION", "payload.duration must be between 0 and 3600 seconds")
    if wanted["input"] is not None and not Path(wanted["input"]).is_file():
        raise JobError("INPUT_MISSING", "payload.input is not a file")
    return wanted


def cut(job: JobContext, wanted: dict[str, Any], output: Path) -> None:
    """Run ffmpeg, which ends with the job; its progress becomes (few) events."""
    if FFMPEG is None:
        pretend(job, wanted, output)
        return
    source = (
        ["-ss", str(wanted["start"]), "-i", wanted["input"]]
        if wanted["input"]
        else ["-f", "lavfi", "-i", "testsrc=size=320x240:rate=25"]
    )
    progress = Progress(job)
    block: list[str] = []

    def on_line(line: str) -> None:
        block.append(line)
        if line.startswith("progress="):
            for report in parse_ffmpeg_progress(block):
                percent = report.percent(wanted["duration"])
                if percent is not None:
                    progress.report(percent)
            block.clear()

    command = [
        FFMPEG,
        "-nostdin",
        "-v",
        "error",
        "-y",
        *source,
        "-t",
        str(wanted["duration"]),
        "-c:v",
        "mpeg4",
    ]
    run_command(job, [*command, "-progress", "pipe:1", str(output)], on_line=on_line, code="FFMPEG_FAILED")


def pretend(job: JobContext, wanted: dict[str, Any], output: Path) -> None:
    """The same shape without ffmpeg."""
    progress = Progress(job)
    for percent in range(0, 101, 10):
        progress.report(percent)
        time.sleep(min(wanted["duration"], 2.0) / 10)
    output.write_bytes(b"no ffmpeg here\n")


def main() -> None:
    set_up_logging(form=os.environ.get("LOG_FORM", "text"))
    port = os.environ.get("WORKER_METRICS_PORT")
    worker = Worker(os.environ["DATABASE_URL"], {"jobs": clip}, metrics_port=int(port) if port else None)
    worker.run()


if __name__ == "__main__":
    main()
