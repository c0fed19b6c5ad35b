"""Run a program for a job, and end it when the job must stop.

A handler that waits for ffmpeg does not look at its context; this does, twenty times a second, so that a
lost lease, a used-up budget or a shutdown reaches the program too. It runs in a process group of its own:
what it started ends with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

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
    with subprocess.Popen(  # noqa: S603 - a list, no shell
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as program:
        messages: list[str] = []
        broke: list[BaseException] = []
        readers = [
            threading.Thread(target=_read, args=(program.stdout, on_line, broke), daemon=True),
            threading.Thread(target=_read, args=(program.stderr, messages.append, broke), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            while program.poll() is None:
                job.check()
                _raise_first(broke)
                job.cancelled.wait(POLL_SEC)
        except BaseException:
            _end(program)
            raise
        finally:
            for reader in readers:
                reader.join(GRACE_SEC)
        _raise_first(broke)
        if program.returncode != 0:
            said = "".join(messages)[-TAIL_CHARS:].strip()
            raise JobError(code, f"{command[0]} ended with {program.returncode}: {said}")


def _read(pipe: object, take: Callable[[str], None] | None, broke: list[BaseException]) -> None:
    try:
        for line in pipe:  # type: ignore[attr-defined]
            if take is not None and not broke:
                take(line)
    except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
        broke.append(error)


def _raise_first(errors: list[BaseException]) -> None:
    if errors:
        raise errors[0]


def _end(program: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(GRACE_SEC)
            return
