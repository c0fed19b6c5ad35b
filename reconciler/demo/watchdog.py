"""Ends a private Postgres when the process that started it is gone, even by SIGKILL.

Run by path, as its own small process (`python -I -S watchdog.py PARENT PID DATA_DIR REMOVE_DIR`), with the
read end of a pipe as stdin. The parent writes one byte to dismiss it; end of file, or a new parent pid,
means the parent died. Both are watched: a forked sibling may hold the pipe open. A signal on parent death
(prctl) would be shorter, but exists on Linux only, and fires when the starting *thread* ends.

Standard library only, and nothing of ours: it must start in milliseconds.
"""

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

POLL_SEC = 0.5
PATIENCE_SEC = 5.0


def dismissed_by(parent: int) -> bool:
    """Wait; True when the parent said it needs us no more, False when it died."""
    while True:
        readable, _, _ = select.select([0], [], [], POLL_SEC)
        if readable:
            return bool(os.read(0, 1))
        if os.getppid() != parent:
            return False


def still_runs(pid: int, data_dir: Path) -> bool:
    """Whether that server still runs. Its own file is asked too, so that a reused pid is never hit."""
    try:
        os.kill(pid, 0)
        return (data_dir / "postmaster.pid").read_text().split("\n", 1)[0] == str(pid)
    except (ProcessLookupError, FileNotFoundError):
        return False


def end(pid: int, data_dir: Path) -> None:
    """Immediate shutdown first, because it takes the server's children along; then by force."""
    deadline = time.monotonic() + PATIENCE_SEC
    if still_runs(pid, data_dir):
        os.kill(pid, signal.SIGQUIT)
    while still_runs(pid, data_dir) and time.monotonic() < deadline:
        time.sleep(0.02)
    if still_runs(pid, data_dir):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    parent, pid, data_dir, remove_dir = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    if dismissed_by(parent):
        return
    end(pid, data_dir)
    shutil.rmtree(remove_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
