"""Session: one reconnecting connection for one purpose, which another thread can cut.

A blocked read has no time-out of its own: a server or a proxy that hangs keeps its TCP alive for ever. So
every statement has a limit, and one thread watches them all: `cut()` shuts the socket down under the
blocked thread, which then sees a lost connection and nothing else. No session state is relied upon
(PgBouncer): time-outs are set inside a transaction.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg

T = TypeVar("T")
Connection = psycopg.Connection[Any]

LOST_CONNECTION = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,  # a failover made this server a replica: another one writes now
)
"""The server did not answer, or said "not now": the same statement may succeed later, on a new connection."""


LIMIT_SEC = 60.0
SHORT_SEC = 20.0


class _Guard:
    """Cuts sessions whose statement takes longer than it may: one thread for the process."""

    def __init__(self) -> None:
        self._deadlines: dict[Session, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes_at = float("-inf")

    @contextmanager
    def limit(self, session: Session, seconds: float) -> Iterator[None]:
        deadline = time.monotonic() + seconds
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="job-reaper-guard", daemon=True)
                self._thread.start()
            self._deadlines[session] = deadline
            if deadline < self._wakes_at:  # rarely: most limits are alike, and it looks then anyway
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._deadlines.pop(session, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                late = [session for session, deadline in self._deadlines.items() if deadline <= now]
                if not late:
                    nearest = min(self._deadlines.values(), default=float("inf"))
                    self._wakes_at = max(now + 0.2, nearest)
                    self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
                    self._wakes_at = float("-inf")
                    continue
                for session in late:
                    self._deadlines[session] = now + 1.0  # again, should it not have heard
            for session in late:
                session.cut()


_guard = _Guard()


class Session:
    """A connection that opens itself again. One thread at a time; `cut` from any."""

    def __init__(self, dsn: str, name: str, *, connect_timeout_sec: int = 5) -> None:
        self._dsn = dsn
        self._name = name
        self._connect_timeout_sec = connect_timeout_sec
        self._conn: Connection | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[Connection], T], *, limit_sec: float = LIMIT_SEC) -> T:
        """Do `work` on the connection; a broken one is dropped, so that the next call gets a new one."""
        with self._lock:
            conn = self._connection()
            try:
                with _guard.limit(self, limit_sec):
                    return work(conn)
            except LOST_CONNECTION:
                self._drop()
                raise

    def transact(self, work: Callable[[Connection], T], *, timeout_sec: float, lock_timeout_sec: float) -> T:
        """The same inside one transaction that the server itself ends when it takes too long."""

        def bounded(conn: Connection) -> T:
            with conn.transaction():
                conn.execute(
                    "SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true)",
                    (_ms(timeout_sec), _ms(lock_timeout_sec)),
                )
                return work(conn)

        return self.run(bounded, limit_sec=timeout_sec + 1)

    def cut(self) -> None:
        """End whatever the connection is waiting for. The thread inside sees an OperationalError."""
        conn = self._conn
        if conn is None:
            return
        # A private copy of the descriptor: the number may be reused the moment the other thread closes it.
        with contextlib.suppress(OSError, psycopg.Error):
            fd = os.dup(conn.fileno())
            with socket.socket(fileno=fd) as copy:
                copy.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        with self._lock:
            self._drop()

    def _connection(self) -> Connection:
        if self._conn is None or self._conn.closed:
            self._conn = psycopg.connect(
                self._dsn,
                autocommit=True,
                prepare_threshold=None,  # PgBouncer may hand the next statement to another server session
                connect_timeout=self._connect_timeout_sec,
                fallback_application_name=f"job-reaper {self._name}",
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=20_000,
            )
        return self._conn

    def _drop(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None


class Sessions:
    """A few sessions for many short statements: opened when needed, the warmest one first."""

    def __init__(self, dsn: str, name: str, size: int) -> None:
        self._free: queue.LifoQueue[Session] = queue.LifoQueue()
        self._all = [Session(dsn, name) for _ in range(size)]
        for session in reversed(self._all):
            self._free.put(session)

    def run(self, work: Callable[[Connection], T]) -> T:
        """Do `work` on a free session, in one transaction; waits while all are in use.

        The server ends what takes too long: one that we only stopped listening to would go on waiting for its
        row, one more with every try, and might even end the job after we asked again.
        """
        with self._borrowed() as session:
            return session.transact(work, timeout_sec=SHORT_SEC, lock_timeout_sec=SHORT_SEC / 2)

    @contextmanager
    def _borrowed(self) -> Iterator[Session]:
        session = self._free.get()
        try:
            yield session
        finally:
            self._free.put(session)

    def cut(self) -> None:
        """End all waits, for a worker that must leave now."""
        for session in self._all:
            session.cut()

    def close(self) -> None:
        """Close all connections."""
        for session in self._all:
            session.close()


def _ms(seconds: float) -> str:
    # 0 would mean "no limit".
    return str(max(1, int(seconds * 1000)))
