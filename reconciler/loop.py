"""A pass every interval, ± 10 % so that reapers do not beat in step; a failing pass never ends the loop."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from reconciler.logs import LOGGER
from reconciler.report import PassReport

JITTER = 0.10
STALE_AFTER_INTERVALS = 3
STALE_AFTER_AT_LEAST_SEC = 30.0
"""With an interval of seconds, a database that cannot be reached must not look like a hung reaper."""


class IntervalLoop:
    """Runs passes until told to stop. `run()` in this thread, or `start()` and `join()` in another."""

    def __init__(
        self, one_pass: Callable[[], PassReport], interval_sec: float, stopping: threading.Event
    ) -> None:
        self._one_pass = one_pass
        self._interval_sec = interval_sec
        self._stopping = stopping
        self._thread: threading.Thread | None = None
        self._progress_at = time.monotonic()

    @property
    def healthy(self) -> bool:
        """False only when no pass finished for three intervals: a hung pass, not a failing one."""
        allowed = max(STALE_AFTER_INTERVALS * self._interval_sec, STALE_AFTER_AT_LEAST_SEC)
        return time.monotonic() - self._progress_at < allowed

    def tick(self) -> None:
        """A batch was begun: a long pass is progress too."""
        self._progress_at = time.monotonic()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._one_pass()
            except Exception:  # noqa: BLE001 - the next pass must run whatever happened in this one
                LOGGER.exception("pass crashed: this is a bug in job-reaper; the next pass runs as usual")
            self.tick()
            self._stopping.wait(self._interval_sec * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="job-reaper", daemon=True)
        self._thread.start()

    def join(self, timeout: float | None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the pass under way did not end within {timeout} s")
