"""Run a program for a job, and end it when the job must stop.

A handler that waits for ffmpeg does not look at its context; this does, twenty times a second, so that a
lost lease, a used-up budget or a shutdown reaches the program too. It runs in a process group of its own:
what it started ends with it, also when the program itself ended well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from reconciler.worker.context import JobContext
from reconciler.worker.errors import JobError

POLL_SEC = 0.05
GRACE_SEC = 2.0
TAIL_CHARS = 400


def run_command(
    job: JobContext,
    command: Sequence[str],
    *,
    on_line: Callable[[str], None] | None = None,
    code: str = "COMMAND_FAILED",
) -> None:
    """Run `command` to its end, giving each line of its standard output to `on_line`.

    Raises what `job.check()` raises when the job must stop, and JobError(code) with the end of the
    program's messages when it fails.
    """
    program = subprocess.Popen(  # noqa: S603 - a list, no shell
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    messages: list[str] = []
    broke: list[BaseException] = []
    readers = [
        threading.Thread(target=_read, args=(program.stdout, on_line, broke), daemon=True),
        threading.Thread(target=_read, args=(program.stderr, messages.append, broke), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        while not _has_ended(program):
            job.check()
            _raise_first(broke)
            job.cancelled.wait(POLL_SEC)
    except BaseException:
        _ask_to_end(program)
        raise
    finally:
        # Always, and before the leader is waited for: until then nobody else can get its number.
        _kill_group(program)
        program.wait()
        for reader in readers:
            reader.join(GRACE_SEC)  # what left the group may hold the pipe; its reader ends with it
    _raise_first(broke)
    if program.returncode != 0:
        said = "".join(messages)[-TAIL_CHARS:].strip()
        raise JobError(code, f"{command[0]} ended with {program.returncode}: {said}")


def _read(pipe: IO[str], take: Callable[[str], None] | None, broke: list[BaseException]) -> None:
    try:
        with pipe:
            for line in pipe:
                if take is not None and not broke:
                    take(line)
    except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
        broke.append(error)


def _raise_first(errors: list[BaseException]) -> None:
    if errors:
        raise errors[0]


def _has_ended(program: subprocess.Popen[str]) -> bool:
    """Has it ended? Without taking its exit code, so that its number and its group stay ours."""
    return os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ask_to_end(program: subprocess.Popen[str]) -> None:
    """SIGTERM, and time to act on it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGTERM)
    until = time.monotonic() + GRACE_SEC
    while not _has_ended(program) and time.monotonic() < until:
        time.sleep(POLL_SEC)


def _kill_group(program: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
