"""Listen: wake up when somebody says that there is work (`NOTIFY job_reaper_queued`).

An optimisation, never a need: the worker also polls, so a lost notification, a missing trigger or a
PgBouncer that cannot LISTEN costs a few seconds and nothing else. docs/how-to/worker.md has the trigger.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

import psycopg
from psycopg import sql

from reconciler.worker.session import Connection, Session

CHANNEL = "job_reaper_queued"
_log = logging.getLogger(__name__)


class Listener:
    """A thread with a connection of its own that calls `on_wake` for every notification."""

    def __init__(self, dsn: str, channel: str, on_wake: Callable[[], None]) -> None:
        self._session = Session(dsn, "listen")
        self._channel = channel
        self._on_wake = on_wake
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-reaper-listener", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening."""
        self._stopping.set()
        self._session.cut()
        self._thread.join(5)
        self._session.close()

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                self._session.run(self._listen, limit_sec=float("inf"))  # waiting is its work
                failures = 0
            except psycopg.Error as error:
                failures += 1
                if failures == 1 and not self._stopping.is_set():
                    _log.warning(
                        "cannot listen, polling only, trying again", extra={"error": str(error).strip()}
                    )
                self._stopping.wait(min(30.0, 2.0**failures) * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    def _listen(self, conn: Connection) -> None:
        conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        self._on_wake()  # whatever was queued before we listened
        while not self._stopping.is_set():
            for _ in conn.notifies(timeout=1.0):
                self._on_wake()
