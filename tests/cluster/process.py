"""Child processes that are stopped by their own pid, and waiting that ends.

Every process of a cluster is started here. It writes its output to a file, it dies with its parent (a
killed pytest must not leave an API server behind), and it is stopped by the pid we got when we started it:
never by a name, because a name may belong to somebody else's process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOG_TAIL_LINES = 25


class ClusterError(Exception):
    """A part of the test cluster did not do what it must; the message says which and shows its last words."""


def wait_until(condition: Callable[[], bool], *, timeout: float, what: str, interval: float = 0.05) -> None:
    """Poll until the condition holds; a deadline missed is an error that names what was awaited."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            raise ClusterError(f"waited {timeout:g} s in vain for {what}")
        time.sleep(interval)


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, for error messages."""
    if not path.exists():
        return f"(no log at {path})"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def run_limited(
    argv: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to its end, but no longer than so many seconds; what it has started ends with it.

    For downloads and builds: their helpers (apt's methods, pip's children) are what hangs.
    """
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            out, err = running.communicate(timeout=seconds)
        except BaseException as reason:
            _end_group(running)
            if isinstance(reason, subprocess.TimeoutExpired):
                words = " ".join(argv)[:300]
                raise ClusterError(f"{words} did not end within {seconds:g} s and was stopped") from None
            raise
    return subprocess.CompletedProcess(argv, running.returncode, out, err)


def _end_group(running: subprocess.Popen[str]) -> None:
    """TERM, so that a package manager can tidy up; then KILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.communicate(timeout=20)
            return


def die_with_parent() -> list[str]:
    """The argv prefix that makes the kernel kill a child when the thread that started it ends.

    A program and not preexec_fn: Python code between fork and exec can deadlock in a process with threads.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise ClusterError("setpriv is missing; install the util-linux package")
    return [setpriv, "--pdeathsig", "KILL", "--"]


@dataclass
class Process:
    """One child process: start, stop, signal; knows its log."""

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] | None = None
    outlive_parent: bool = False
    pass_fds: tuple[int, ...] = ()
    _popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it; output is appended, so that a restarted server keeps its history in one file."""
        if self.running:
            raise ClusterError(f"{self.name} already runs as pid {self.pid}")
        prefix = [] if self.outlive_parent else die_with_parent()
        with self.log.open("ab") as output:
            self._popen = subprocess.Popen(
                [*prefix, *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.env,
                # Its own session: a Ctrl-C in the terminal reaches pytest only, which then stops its
                # cluster in order.
                start_new_session=True,
                pass_fds=self.pass_fds,
            )

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int:
        if self._popen is None:
            raise ClusterError(f"{self.name} was never started")
        return self._popen.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""
        if not self.running:
            raise ClusterError(f"{self.name} does not run:\n{log_tail(self.log)}")
        assert self._popen is not None
        self._popen.send_signal(number)

    def stop(self, *, grace: float = 15.0) -> None:
        """Ask it to end, then make it. Stopping what has ended is fine: tear-down must reach its end."""
        if self._popen is None or self._popen.poll() is not None:
            return
        self._popen.send_signal(signal.SIGCONT)
        self._popen.terminate()
        try:
            self._popen.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it without asking, as a crash would."""
        if self._popen is None:
            return
        self._popen.kill()
        self._popen.wait(30)

    def wait_ready(self, condition: Callable[[], bool], *, timeout: float, what: str) -> None:
        """Wait for the condition, but no longer than the process lives."""

        def check() -> bool:
            if not self.running:
                raise ClusterError(f"{self.name} ended while we waited for {what}:\n{log_tail(self.log)}")
            return condition()

        try:
            wait_until(check, timeout=timeout, what=what)
        except ClusterError as error:
            raise ClusterError(f"{error}\n--- {self.name} ---\n{log_tail(self.log)}") from None
