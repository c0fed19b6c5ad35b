"""News: what the beating process tells its parent, from a thread of its own.

A parent that holds the GIL reads nothing for seconds, the pipe fills up, and a write to it blocks: that must
never stop a beat. So news are kept here, the latest of each job only, until the pipe takes them again.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from reconciler.worker.claim import Claim
from reconciler.worker.keeper import Key


def as_row(claim: Claim) -> dict[str, Any]:
    """A claim as JSON takes it."""
    return {**asdict(claim), "id": str(claim.id)}


class News:
    """Lines of JSON, each with all that is new. To be told from any thread, without a wait."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._renewed: dict[Key, dict[str, Any]] = {}
        self._lost: dict[Key, dict[str, Any]] = {}
        self._beats = self._failures = 0.0
        self._other: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="job-reaper-news", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def renewed(self, claim: Claim, sent_at: float) -> None:
        with self._changed:
            self._renewed[claim.key] = {"claim": as_row(claim), "sent_at": sent_at}
            self._changed.notify()

    def lost(self, claim: Claim) -> None:
        with self._changed:
            self._renewed.pop(claim.key, None)
            self._lost[claim.key] = as_row(claim)
            self._changed.notify()

    def counted(self, beats: float, failures: float) -> None:
        with self._changed:
            self._beats += beats
            self._failures += failures
            self._changed.notify()

    def ready(self, ready: bool) -> None:
        with self._changed:
            self._other["ready"] = ready
            self._changed.notify()

    def echo(self) -> None:
        """The parent asks for all that was said before."""
        with self._changed:
            self._other["echo"] = True
            self._changed.notify()

    def take(self) -> dict[str, Any]:
        """All that is new, once there is something."""
        with self._changed:
            while not (self._renewed or self._lost or self._beats or self._failures or self._other):
                self._changed.wait()
            news = {"renewed": list(self._renewed.values()), "lost": list(self._lost.values()), **self._other}
            news |= {"beats": self._beats, "failures": self._failures}
            self._renewed, self._lost, self._other = {}, {}, {}
            self._beats = self._failures = 0.0
            return news

    def _run(self) -> None:
        try:
            while True:
                self._write(json.dumps(self.take()) + "\n")
        finally:
            os._exit(1)  # a beating process nobody hears is none: the parent beats by itself then
