"""The one connection a migration runs on: direct, alone, and patient with locks.

A migration needs session state (an advisory lock, lock_timeout around CONCURRENTLY), so a pooler in
transaction mode is found out and refused before anything is changed.
"""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row

from reconciler.database import checked_dsn, translate
from reconciler.errors import MigrationError
from reconciler.migrate_catalog import Connection, Server, read_server
from reconciler.sql import query

Say = Callable[[str], None]

LOCK_KEY = int.from_bytes(b"reaper-m"[:8], "big") >> 1
"""One advisory lock a database: two migrators must not build the same index."""

_POOLED = (
    "a connection pooler in transaction mode stands between job-reaper and Postgres; migrate needs session"
    " state (its lock, lock_timeout around CREATE INDEX CONCURRENTLY): give DATABASE_URL the server's own"
    " host and port for this one command"
)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for others, and how politely.

    Statements that lock the table wait at most `lock_timeout_ms`, because everybody else queues up behind
    them. CONCURRENTLY blocks nobody while it waits, and giving up throws its scan away: it may wait long.
    """

    lock_timeout_ms: int = 1_000
    concurrent_timeout_ms: int = 900_000
    tries: int = 30
    first_pause_sec: float = 0.5
    longest_pause_sec: float = 10.0
    rival_sec: float = 600.0


@contextmanager
def session(dsn: str | None, *, read_only: bool) -> Iterator[tuple[Connection, Server]]:
    """A connection of our own, without the role's time limits: an index on a big table takes its time."""
    url = checked_dsn(dsn)
    try:
        conn = _connect(url)
    except psycopg.Error as error:
        raise translate(error) from error
    with conn:
        try:
            server = read_server(conn)
            if not read_only:
                _refuse_pooler(conn, server, url)
            conn.execute("SET statement_timeout = 0")
            conn.execute("SET lock_timeout = '5s'")  # even reading the catalogue may meet a lock
            conn.execute("SET idle_in_transaction_session_timeout = '60s'")
            if read_only:
                conn.execute("SET default_transaction_read_only = on")
        except psycopg.Error as error:
            raise translate(error) from error
        yield conn, server


@contextmanager
def alone(conn: Connection, patience: Patience, say: Say) -> Iterator[None]:
    """Hold the migrators' lock. Waits for a rival, which may be the orphaned backend of a killed run."""
    deadline = time.monotonic() + patience.rival_sec
    told = False
    while not _scalar(conn, "lock", {"key": LOCK_KEY}):
        rival = _rival(conn)
        if time.monotonic() > deadline:
            raise MigrationError(
                f"another migration has been running for {patience.rival_sec:.0f} s{rival}: wait for it, or"
                " end it with pg_terminate_backend(pid), and run migrate again: it goes on from there",
                code="locked",
            )
        if not told:
            say(f"another migration is running{rival}: waiting for it to end")
            told = True
        time.sleep(min(0.5, patience.first_pause_sec))
    try:
        yield
    finally:
        if not conn.closed and not conn.broken:
            conn.execute(query("migrate", "unlock"), {"key": LOCK_KEY})


class Retries:
    """Counts the tries of each step and pauses between them: meanwhile nobody waits for us."""

    def __init__(self, patience: Patience, say: Say) -> None:
        self._patience = patience
        self._say = say
        self._tries: dict[str, int] = {}

    def pause(self, conn: Connection, title: str, error: psycopg.Error) -> None:
        """Wait before the next try of this step, or raise when there have been enough."""
        number = self._tries[title] = self._tries.get(title, 0) + 1
        busy = _busy(conn)
        if number >= self._patience.tries:
            raise MigrationError(
                f"{title}: no lock after {number} tries{busy}. What was done is kept and the next run goes on"
                " from there: end the long transactions and run migrate again",
                code="lock_timeout",
            ) from error
        seconds = min(self._patience.first_pause_sec * 2 ** (number - 1), self._patience.longest_pause_sec)
        self._say(f"{title}: others hold a lock{busy}; try {number + 1} in {seconds:.1f} s")
        time.sleep(seconds)


def same_backend(conn: Connection, pid: int) -> None:
    """Our lock belongs to one backend; another one would run without it."""
    if read_server(conn).pid != pid:
        raise MigrationError(_POOLED, code="pooler")


def old_transactions(conn: Connection) -> list[dict[str, Any]]:
    """Sessions that an index CONCURRENTLY has to wait for, oldest first."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query("migrate", "old_transactions")).fetchall()


def _busy(conn: Connection) -> str:
    rows = old_transactions(conn)
    texts = [f"pid {r['pid']} ({r['application_name']}, open for {r['age_sec']} s)" for r in rows]
    return f"; oldest transactions: {', '.join(texts)}" if texts else ""


def _connect(url: str) -> Connection:
    return psycopg.connect(
        url,
        autocommit=True,
        prepare_threshold=None,
        connect_timeout=10,
        fallback_application_name="job-reaper migrate",
    )


def _refuse_pooler(conn: Connection, server: Server, url: str) -> None:
    """A pooler answers the handshake itself, so libpq's idea of the backend differs from the server's.

    In session mode that is all right. In transaction mode a setting we leave behind turns up in somebody
    else's session: a few fresh connections look for it.
    """
    if conn.info.backend_pid == server.pid:
        return
    mark = secrets.token_hex(8)
    conn.execute(f"SET job_reaper.probe = '{mark}'")  # hex digits of our own
    for _ in range(5):
        with _connect(url) as other:
            seen = _seen(other)
        if seen == mark:
            conn.execute("RESET job_reaper.probe")
            raise MigrationError(_POOLED, code="pooler")
        if seen is None:  # a full pool keeps it waiting, so nobody shares our session
            return


def _seen(other: Connection) -> str | None:
    """What another session sees of our mark; None when it gets no answer in time."""
    other.pgconn.send_query(b"SELECT current_setting('job_reaper.probe', true)")
    other.pgconn.flush()
    deadline = time.monotonic() + 2.0
    while other.pgconn.is_busy():
        if not select.select([other.pgconn.socket], [], [], max(deadline - time.monotonic(), 0))[0]:
            other.pgconn.finish()
            return None
        other.pgconn.consume_input()
    result = other.pgconn.get_result()
    value = result.get_value(0, 0) if result is not None and result.ntuples else None
    other.pgconn.finish()
    return (value or b"").decode()


def _rival(conn: Connection) -> str:
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(query("migrate", "rival"), {"key": LOCK_KEY}).fetchone()
    return f" (pid {row['pid']}, {row['application_name']}, {row['host']})" if row else ""


def _scalar(conn: Connection, name: str, parameters: Mapping[str, Any]) -> Any:
    row = conn.execute(query("migrate", name), parameters).fetchone()
    assert row is not None
    return row[0]
