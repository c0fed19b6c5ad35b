"""Beats from a process of their own, for handlers that hold the GIL (C extensions, long regular expressions).

The child runs the same Beater and dies with its parent: its standard input is a pipe that only the parent
holds, and its end is the child's end. A parent that was stopped (SIGSTOP, a frozen cgroup's cousin) is not
alive, so the child does not beat for it. It knows each job's budget and stops beating past it by itself,
because the parent that holds the GIL cannot tell it to.

Lines of JSON in both directions; the connection string travels on the pipe, never in the arguments.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reconciler.worker import metrics
from reconciler.worker.beater import Beater
from reconciler.worker.child_keeper import ChildKeeper
from reconciler.worker.claim import Claim
from reconciler.worker.keeper import Keeper
from reconciler.worker.news import News, as_row
from reconciler.worker.sdk import Sdk

CATCH_UP_SEC = 0.2
CATCH_UP_LOOKS = 5
COMMAND = (sys.executable, "-m", "reconciler.worker.beat_process")
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger(__name__)


class ProcessBeater:
    """The parent's side: looks like a Beater, tells the child what to beat, hears what became of it.

    When the child dies the parent beats itself, in a thread, and says so: better late beats than none.
    """

    def __init__(
        self,
        dsn: str,
        keeper: Keeper,
        sdk: Sdk,
        *,
        on_ready: Callable[[bool], None] = lambda ready: None,
    ) -> None:
        self._dsn = dsn
        self._on_ready = on_ready
        self._child_ready = False
        self._puzzled = False
        self._keeper = keeper
        self._sdk = sdk
        self._child: subprocess.Popen[str] | None = None
        self._fallback: Beater | None = None
        self._stopping = threading.Event()
        self._told = threading.RLock()
        self._echo = threading.Event()
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Start the child."""
        # Inherited: not even while it starts may the child end by a signal that its parent answers politely.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEAVE_SIGNALS)
        try:
            self._child = subprocess.Popen(  # noqa: S603 - our own module
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C in the terminal is for the parent to judge
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        setup = base64.b64encode(pickle.dumps((self._dsn, self._sdk.plain()))).decode("ascii")
        self._tell({"setup": setup})
        self._reader = threading.Thread(target=self._listen, name="job-reaper-beats", daemon=True)
        self._reader.start()

    def poke(self) -> None:
        """The set of jobs changed."""
        if self._fallback is not None:
            self._fallback.poke()
            return
        # Under one lock: of two changes at once, the later list must also be told later.
        with self._told:
            jobs = [
                {"claim": as_row(claim), "sent_at": sent_at, "budget_at": budget_at}
                for claim, sent_at, budget_at in self._keeper.schedule()
            ]
            self._tell({"jobs": jobs})

    def stop(self) -> None:
        """End the child; only when no job is held any more."""
        self._stopping.set()
        if self._fallback is not None:
            self._fallback.stop()
        child = self._child
        if child is None:
            return
        with contextlib.suppress(OSError):
            assert child.stdin is not None
            child.stdin.close()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if self._reader is not None:
            self._reader.join(5)
        assert child.stdout is not None
        child.stdout.close()

    def catch_up(self) -> None:
        """Hear all that the child said so far: its echo comes after it. Bounded, for a child that is gone.

        Time in which no thread of ours could run (the GIL was taken again) counts for nothing: the echo may
        lie unread.
        """
        if self._fallback is not None:
            return
        self._echo.clear()
        self._tell({"echo": True})
        looks = 0
        while looks < CATCH_UP_LOOKS and not self._stopping.is_set():
            began = time.monotonic()
            if self._echo.wait(CATCH_UP_SEC):
                return
            looks += time.monotonic() - began < 2 * CATCH_UP_SEC

    def ready(self) -> bool:
        """Do beats come through, from the child or from the thread in its place?"""
        return self._child_ready if self._fallback is None else self._fallback.ready()

    @property
    def pid(self) -> int | None:
        """The child's, for tests and for whoever looks at a process list."""
        return None if self._child is None else self._child.pid

    def _tell(self, message: dict[str, Any]) -> None:
        child = self._child
        if child is None or child.stdin is None:
            return
        with self._told, contextlib.suppress(OSError, ValueError):  # a dead child is noticed by the reader
            child.stdin.write(json.dumps(message) + "\n")
            child.stdin.flush()

    def _listen(self) -> None:
        child = self._child
        assert child is not None
        assert child.stdout is not None
        try:
            for line in child.stdout:
                self._understand(line)
        finally:
            if not self._stopping.is_set():
                self._fall_back(child)

    def _understand(self, line: str) -> None:
        try:
            self._hear(json.loads(line))
        except Exception as error:  # noqa: BLE001 - something printed there must not end the beats; logged
            if not self._puzzled:
                _log.warning("the beating process says odd things", extra={"error": str(error)})
            self._puzzled = True

    def _fall_back(self, child: subprocess.Popen[str]) -> None:
        _log.error("the beating process died; beating from a thread")
        self._child_ready = False
        child.kill()  # should it be alive all the same: nobody hears it any more
        beater = Beater(self._dsn, self._keeper, self._sdk, on_ready=self._on_ready)
        while not self._stopping.is_set():
            try:
                beater.start()
            except RuntimeError:  # no thread to be had just now
                self._stopping.wait(1)
            else:
                self._fallback = beater
                beater.poke()
                return

    def _hear(self, news: dict[str, Any]) -> None:
        if "ready" in news:
            self._child_ready = news["ready"]
            self._on_ready(self._child_ready)
        if "beats" in news:
            metrics.HEARTBEATS.add(news["beats"])
            metrics.HEARTBEAT_FAILURES.add(news["failures"])
        for row in news.get("renewed", ()):
            self._keeper.renewed(Claim(**row["claim"]), row["sent_at"])
        for row in news.get("lost", ()):
            claim = Claim(**row)
            self._keeper.lost(claim, claim.lost(), "fenced")
        if "echo" in news:  # last: it says that all before it was heard
            self._echo.set()


# ── the child ───────────────────────────────────────────────────────────────────────────────────────


def _parent_runs(parent: int) -> bool:
    """Not for a parent that was stopped, or that is gone already."""
    if os.getppid() != parent:
        return False
    try:
        state = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True  # no /proc on this system: the pipe alone tells
    return state not in ("T", "t", "Z", "X")


def main() -> None:
    """The child: beat what standard input says, until it ends."""
    for number in LEAVE_SIGNALS:  # the parent drains its jobs, and they must be beaten until then
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    dsn, sdk = pickle.loads(base64.b64decode(json.loads(sys.stdin.readline())["setup"]))  # noqa: S301 - our own parent's pipe
    news = News(_print)
    news.start()
    keeper = ChildKeeper(news)
    beater = Beater(dsn, keeper, sdk, may_beat=lambda: _parent_runs(parent), on_ready=news.ready)
    beater.start()
    threading.Thread(target=_report_counts, args=(news,), daemon=True).start()
    for line in sys.stdin:
        message = json.loads(line)
        if "echo" in message:
            news.echo()
        else:
            keeper.take_over(message["jobs"])
            beater.poke()
    os._exit(0)  # at once: nothing of ours may beat for a parent that is gone


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def _report_counts(news: News) -> None:
    told = (0.0, 0.0)
    while True:
        time.sleep(1)
        now = (metrics.HEARTBEATS.value(), metrics.HEARTBEAT_FAILURES.value())
        if now != told:
            news.counted(now[0] - told[0], now[1] - told[1])
            told = now


if __name__ == "__main__":
    main()
