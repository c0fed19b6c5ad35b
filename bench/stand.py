"""The test stand: a durable Postgres of our own, databases that are byte-for-byte alike, and honest clocks.

Two sides are compared on copies of one template database, so that neither meets the other's dead rows, page
splits or statistics. The server keeps Postgres' own durability (fsync, full_page_writes,
synchronous_commit); autovacuum is off, because when it strikes is chance, and the templates are vacuumed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from bench.sql import query
from reconciler.demo.postgres import EmbeddedPostgres
from reconciler.migrate import Heartbeats, migrate

Connection = psycopg.Connection[tuple[Any, ...]]
TABLES = ("jobs", "asr_jobs")
HOLDERS = 500
SETTINGS = {
    "autovacuum": "off",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "log_line_prefix": "%n seen ",  # the instant, for the cold start
}
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Times:
    """How long something took, by the clock on the wall and by the processors it kept busy."""

    wall: float
    cpu: float | None


class Stand:
    """One server for a whole run of the bench."""

    def __init__(self, server: EmbeddedPostgres, scale: float = 1.0) -> None:
        self.server = server
        self.scale = scale
        self._numbers = count(1)
        self._admin: Connection = psycopg.connect(server.dsn, autocommit=True)

    # ── how much ────────────────────────────────────────────────────────────────────────────────────

    def rows(self, full: int) -> int:
        """A number of rows at this run's scale; never so few that a batch has no second one."""
        return max(int(full * self.scale), 20)

    def times(self, full: int) -> int:
        """A number of repetitions at this run's scale."""
        return full if self.scale >= 0.1 else 2

    # ── databases ───────────────────────────────────────────────────────────────────────────────────

    def migrated(self, heartbeats: Heartbeats = "default") -> str:
        """The name of a new database with the schema that `job-reaper migrate` makes."""
        name = f"bench_{next(self._numbers)}"
        self._run("CREATE DATABASE {} TEMPLATE template0", name)
        migrate(self.dsn(name), heartbeats=heartbeats)
        return name

    def fill(self, name: str, what: str, rows: int) -> None:
        """Add rows to both tables, half of them each."""
        with self.connect(name) as conn:
            for table in TABLES:
                conn.execute(query("fill", what, table=table), {"rows": rows // 2, "holders": HOLDERS})

    def settle(self, name: str) -> None:
        """What autovacuum would have done by now: no dead rows, hint bits set, statistics fresh."""
        with self.connect(name) as conn:
            conn.execute("VACUUM (FREEZE, ANALYZE)")

    def copy(self, template: str) -> str:
        """A byte-for-byte copy of a database."""
        name = f"bench_{next(self._numbers)}"
        # Copies of files, not a replay through the WAL: faster, and it leaves no WAL to be flushed by others.
        how = " STRATEGY FILE_COPY" if self._admin.info.server_version >= 150000 else ""
        self._run("CREATE DATABASE {} TEMPLATE {}" + how, name, template)
        return name

    @contextmanager
    def fresh(self, template: str) -> Iterator[str]:
        """A warm copy with a clean slate behind it: checkpointed, its pages read once."""
        name = self.copy(template)
        try:
            with self.connect(name) as conn:
                for table in TABLES:
                    conn.execute(
                        sql.SQL("SELECT count(*), max(locked_by) FROM {}").format(sql.Identifier(table))
                    )
                conn.execute("CHECKPOINT")
            yield name
        finally:
            self.drop(name)

    def drop(self, name: str) -> None:
        self._run("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def alter(self, name: str, setting: str) -> None:
        """Set a server setting for all sessions of one database."""
        self._run("ALTER DATABASE {} SET " + setting, name)

    def dsn(self, name: str) -> str:
        return self.server.dsn_for(name)

    @contextmanager
    def connect(self, name: str) -> Iterator[Connection]:
        with psycopg.connect(self.dsn(name), autocommit=True) as conn:
            yield conn

    def version(self) -> str:
        row = self._admin.execute("SHOW server_version").fetchone()
        assert row is not None
        return str(row[0]).split()[0]

    def close(self) -> None:
        self._admin.close()

    def _run(self, statement: str, *names: str) -> None:
        text = sql.SQL(statement)
        self._admin.execute(text.format(*map(sql.Identifier, names)))

    # ── clocks ──────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def clock(self) -> Iterator[list[Times]]:
        """Time what is done; the sessions opened meanwhile must be closed at the end of it.

        The processor time is that of the server's sessions plus our own (and our children's): on a shared
        machine it says more than the wall, because waiting for others is not in it.
        """
        taken: list[Times] = []
        sessions, before = self._sessions(), self._cpu()
        began = time.perf_counter()
        yield taken
        wall = time.perf_counter() - began
        self._wait_for_the_end_of_new(sessions)
        after = self._cpu()
        taken.append(Times(wall, None if before is None or after is None else after - before))

    def _wait_for_the_end_of_new(self, sessions: set[str] | None) -> None:
        """Only a session that the postmaster has waited for is in its account."""
        deadline = time.monotonic() + 10
        while sessions is not None and (left := (self._sessions() or set()) - sessions):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(left)} sessions do not end: close what was opened")
            time.sleep(0.005)

    def _sessions(self) -> set[str] | None:
        """The server's processes, where the system tells (Linux)."""
        try:
            return set(Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split())
        except FileNotFoundError:
            return None

    def _cpu(self) -> float | None:
        """Processor seconds of all sessions that have ended, and of our own side."""
        try:
            # Fields 16 and 17: user and system time of the children that the postmaster has waited for.
            fields = Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return None
        ours = os.times()
        ticks = os.sysconf("SC_CLK_TCK")
        own = ours.user + ours.system + ours.children_user + ours.children_system
        return (int(fields[13]) + int(fields[14])) / ticks + own


def job_reaper(dsn: str, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the real command on this database, in an environment without anybody else's settings."""
    return subprocess.Popen(
        [sys.executable, "-m", "reconciler", *arguments],
        cwd=ROOT,
        env=plain_environment() | {"DATABASE_URL": dsn, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def plain_environment() -> dict[str, str]:
    """PATH and nothing that could configure a reaper."""
    return {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
