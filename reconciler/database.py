"""One connection to Postgres: opened late, opened again when lost, errors translated into ours.

No session state is relied upon (PgBouncer in transaction mode): time-outs are set inside each
transaction, nothing is prepared on the server, no session lock is taken.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo

from reconciler.errors import (
    ConfigError,
    DatabaseError,
    Problem,
    ReaperError,
    RowError,
    TableError,
    TransientError,
)

T = TypeVar("T")
Row = tuple[Any, ...]
Connection = psycopg.Connection[Row]

TRIES = 5
FIRST_PAUSE_SEC = 0.1

HANG_MARGIN_SEC = 10.0
"""Beyond twice the statement time-out plus this, a server that has not answered is frozen or gone."""

# A peer that vanished without a word (failover, cut cable) is noticed within half a minute, not in hours.
_KEEPALIVE: dict[str, Any] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

_SETTINGS = (
    "SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true),"
    " set_config('idle_in_transaction_session_timeout', %s, true), set_config('jit', 'off', true)"
)

# Worth another try on the same or a new connection: the server said "not now", not "never".
_TRANSIENT = frozenset({"40001", "40P01", "55P03", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04"})
_TRANSIENT_CLASSES = frozenset({"08", "53"})
# The server turned us away before it could give a code, or libpq could not use what it was given.
_REFUSALS = (
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "not permitted to log in",
    "permission denied for database",
    "no password supplied",
    "invalid ",
)
_CONFLICTS = frozenset({"40001", "40P01"})
_ROW_CLASSES = frozenset({"21", "22", "23", "27", "2F", "38", "39", "44", "P0", "54", "XX"})

CONFLICT_CODES = frozenset({"conflict", "lock_timeout"})
"""Others were in the way. It may pass; or it is one row's trigger, and then it never does."""


class Database:
    """A connection and its manners. Not shared between threads."""

    def __init__(
        self,
        dsn: str | None,
        *,
        statement_timeout_ms: int = 30_000,
        lock_timeout_ms: int = 2_000,
        connect_timeout_sec: int = 10,
        application_name: str = "job-reaper",
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.dsn = checked_dsn(dsn)
        self._statement_timeout_ms = statement_timeout_ms
        self._lock_timeout_ms = lock_timeout_ms
        self._connect_timeout_sec = connect_timeout_sec
        self._application_name = application_name
        self._pause = pause
        self._conn: Connection | None = None

    def another(self) -> Database:
        """The same settings on a connection of its own, for a second thread."""
        twin = Database.__new__(Database)
        for name, value in vars(self).items():
            setattr(twin, name, value)
        twin._conn = None
        return twin

    def run(
        self,
        work: Callable[[Connection], T],
        *,
        conflict_tries: int = TRIES,
        lock_tries: int = TRIES,
        lock_timeout_ms: int | None = None,
    ) -> T:
        """Do `work` in one transaction; try again when the server only said "not now".

        The work must be repeatable: a connection lost during COMMIT may have committed. Ours is, because a
        row that was changed is not found again. A caller who can do better than try a conflict again (a
        smaller batch, the next row) says so with `conflict_tries` and `lock_tries`.
        """
        for attempt in range(1, TRIES + 1):
            try:
                with self._transaction(lock_timeout_ms) as conn:
                    return work(conn)
            except psycopg.Error as error:
                translated = translate(error)
                self._drop_if_broken()
                tries = {"conflict": conflict_tries, "lock_timeout": lock_tries}.get(translated.code, TRIES)
                if attempt >= tries or not isinstance(translated, TransientError):
                    raise translated from error
                self._pause(FIRST_PAUSE_SEC * 2 ** (attempt - 1) * (1 + random.random()))  # noqa: S311 - jitter
        raise AssertionError("unreachable")

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    @contextmanager
    def _transaction(self, lock_timeout_ms: int | None) -> Iterator[Connection]:
        conn = self._connection()
        statement_ms = str(self._statement_timeout_ms)
        lock_ms = str(self._lock_timeout_ms if lock_timeout_ms is None else lock_timeout_ms)
        with self._hang_up_when_frozen(conn), conn.transaction():
            conn.execute(_SETTINGS, (statement_ms, lock_ms, statement_ms))
            yield conn

    @contextmanager
    def _hang_up_when_frozen(self, conn: Connection) -> Iterator[None]:
        """The server's time-outs need a server that runs. One that is frozen would hold us for ever."""
        limit_sec = 2 * self._statement_timeout_ms / 1000 + HANG_MARGIN_SEC
        timer = threading.Timer(limit_sec, _shut, [conn.fileno()])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _connection(self) -> Connection:
        if self._conn is None or self._conn.closed:
            given = _parsed(self.dsn) or {}
            self._conn = psycopg.connect(
                self.dsn,
                **{key: value for key, value in _KEEPALIVE.items() if key not in given},
                autocommit=True,
                prepare_threshold=None,  # PgBouncer may hand the next statement to another server session
                connect_timeout=self._connect_timeout_sec,
                fallback_application_name=self._application_name,
            )
        return self._conn

    def _drop_if_broken(self) -> None:
        if self._conn is not None and (self._conn.closed or self._conn.broken):
            self.close()


def checked_dsn(dsn: str | None) -> str:
    """Refuse a connection string that libpq cannot even parse, without ever printing it."""
    parsed = _parsed(dsn or "")
    # An @ left in the host is the tail of a password whose own @ was not encoded: never let it reach a log.
    spilt = parsed is not None and any("@" in str(parsed.get(part) or "") for part in ("host", "dbname"))
    if parsed is None or spilt or not _are_ports(str(parsed.get("port") or "")):
        problem = Problem(
            key="DATABASE_URL",
            value="(hidden)",
            allowed="a libpq URL or key=value string, e.g. postgresql://user:password@host:5432/app",
            hint="Characters such as @ : / # in a password must be percent-encoded; a port is a number",
        )
        raise ConfigError([problem])
    return dsn or ""


def _shut(fileno: int) -> None:
    """End both directions of a socket from another thread: the call that waits on it fails at once."""
    with socket.socket(fileno=os.dup(fileno)) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def _parsed(dsn: str) -> dict[str, Any] | None:
    try:
        return dict(conninfo.conninfo_to_dict(dsn))
    except psycopg.ProgrammingError:  # its text may quote the password
        return None


def _are_ports(text: str) -> bool:
    """One port, or several for several hosts; an empty one means the default."""
    return all(port == "" or (port.isdecimal() and 0 < int(port) < 65536) for port in text.split(","))


def translate(error: psycopg.Error) -> ReaperError:  # noqa: PLR0911 - a table of cases reads best as one
    """Say whose fault it is: the moment's, the table's, a row's, or the database's as a whole."""
    state = error.sqlstate
    message = _first_line(error)
    if state is None:
        return _without_state(error, message)
    if state == "57014":  # our statement_timeout: a smaller batch may pass, so it is the rows' fault
        return RowError(message, code="statement_timeout")
    if state in _TRANSIENT or state[:2] in _TRANSIENT_CLASSES:
        code = "lock_timeout" if state == "55P03" else "conflict" if state in _CONFLICTS else "transient"
        return TransientError(message, code=code)
    if error.diag.context or _by_row_policy(state, message):
        # Raised inside a function of the app, a trigger's as a rule: whatever its code says, a row did it.
        return RowError(f"{message} (SQLSTATE {state})", code="row")
    if state == "25006":
        return DatabaseError(
            f"{message}; the database is read-only: point DATABASE_URL at the primary", code="read_only"
        )
    if state[:2] in ("28", "3D"):
        return DatabaseError(f"{message}; check user, password and database in DATABASE_URL", code="refused")
    if state == "42501":
        return TableError(
            f"{message}; migrations/grants.sql gives exactly what a pass needs", code="no_rights"
        )
    if state[:2] in _ROW_CLASSES:
        return RowError(f"{message} (SQLSTATE {state})", code="row")
    return TableError(f"{message} (SQLSTATE {state})", code="sql")


def _by_row_policy(state: str, message: str) -> bool:
    return state == "42501" and "row-level security" in message


def _without_state(error: psycopg.Error, message: str) -> ReaperError:
    """Libpq's own words: no server answered, or it refused before it could give a code."""
    if any(words in message for words in _REFUSALS):
        return DatabaseError(f"{message}; check user, password and database in DATABASE_URL", code="refused")
    if isinstance(error, psycopg.OperationalError):
        return TransientError(
            f"{message}; is the database up, and are host and port in DATABASE_URL right?", code="unreachable"
        )
    return DatabaseError(message, code="driver")


def _first_line(error: psycopg.Error) -> str:
    text = error.diag.message_primary or str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
