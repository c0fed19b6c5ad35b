"""Passes for tests: in this process, or as the real command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from reconciler.config import Settings, load
from reconciler.reaper import Reaper
from reconciler.report import PassReport
from tests.postgres import Connection

BOTH_TABLES = ("jobs", "asr_jobs")


def settings_for(dsn: str, overrides: Mapping[str, object] | None = None, **env: str) -> Settings:
    """The configuration of a test: nothing of this machine's environment, only what the test says."""
    return load(env={"DATABASE_URL": dsn, **env}, overrides=overrides)


@contextmanager
def a_reaper(dsn: str, overrides: Mapping[str, object] | None = None, **options: Any) -> Iterator[Reaper]:
    """A reaper in this process; `options` are Reaper's own, upper-case ones are environment variables."""
    env = {name: str(options.pop(name)) for name in list(options) if name.isupper()}
    reaper = Reaper(settings=settings_for(dsn, overrides, **env), **options)
    try:
        yield reaper
    finally:
        reaper.close()


def one_pass(dsn: str, overrides: Mapping[str, object] | None = None, **options: Any) -> PassReport:
    """One pass in this process; `dry_run=True` and what a_reaper takes."""
    dry_run = options.pop("dry_run", None)
    with a_reaper(dsn, overrides, **options) as reaper:
        return reaper.run_once(dry_run=dry_run)


# ── the command ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Ended:
    """What a finished command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on stdout's last line."""
        document: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return document

    @property
    def log(self) -> list[dict[str, Any]]:
        """Every line of stderr, each of which must be JSON."""
        return [json.loads(line) for line in self.stderr.splitlines()]

    def said(self, message: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["msg"] == message]


def environment(dsn: str, **env: str) -> dict[str, str]:
    """The child's environment: ours without any variable that configures a reaper or libpq."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "DATABASE_URL": dsn, "PYTHONPATH": os.getcwd(), **env}


def started(dsn: str, *arguments: str, python: Sequence[str] = (), **env: str) -> subprocess.Popen[str]:
    """`job-reaper <arguments>` as a process; the caller ends it."""
    return subprocess.Popen(
        [sys.executable, *python, "-m", "reconciler", *arguments],
        env=environment(dsn, **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], timeout_sec: float = 60) -> Ended:
    """Wait for a started command; one that hangs is killed and fails the test."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_sec)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Ended(process.returncode, stdout, stderr)


def once(dsn: str, *arguments: str, **env: str) -> Ended:
    """`job-reaper once --output json` as a process."""
    return ended(started(dsn, "once", "--output", "json", *arguments, **env))


# ── what the database says ──────────────────────────────────────────────────────────────────────────


def many_expired(
    conn: Connection, count: int, table: str = "jobs", *, holder: str = "worker-1", attempt: int = 1
) -> None:
    """Expired rows, each with a lease of its own: the pages of a pass have distinct ends."""
    conn.execute(
        f"insert into {table} (status, locked_by, lease_expires_at, last_heartbeat_at, processing_started_at,"
        " attempt_count, max_attempts)"
        " select 'processing', %s, now() - make_interval(secs => 60 + n), now() - interval '1 day',"
        " now() - interval '2 days', %s, 3 from generate_series(1, %s) as n",
        (holder, attempt, count),
    )


def count_of(conn: Connection, statement: str, parameters: Sequence[object] = ()) -> Any:
    """The single value a query answers with."""
    row = conn.execute(statement.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def by_status(conn: Connection, table: str = "jobs") -> dict[str, int]:
    rows = conn.execute(f"select status::text, count(*) from {table} group by 1".encode())
    return dict(rows.fetchall())


def one_event_per_change(conn: Connection, table: str = "jobs") -> bool:
    """Every changed row has exactly one event, every event a changed row."""
    odd = (
        f"select count(*) from {table} j"
        " full join (select job_id, count(*) as n from job_events group by 1) e on e.job_id = j.id::text"
        " where (j.status = 'processing') <> (e.n is null) or e.n > 1"
    )
    return bool(count_of(conn, odd) == 0)


def delay_sec(conn: Connection, job: Any, table: str) -> float:
    """How far ahead of the event's own moment the job may run again."""
    value = count_of(
        conn,
        f"select extract(epoch from j.next_earliest_run_at - (e.data ->> 'at')::timestamptz)::float8"
        f" from {table} j join job_events e on e.job_id = j.id::text where j.id = %s"
        " order by e.data ->> 'at' desc limit 1",
        (job,),
    )
    assert value is not None
    return float(value)


def waits_for_a_lock(conn: Connection, pid: int) -> bool:
    """Whether that backend provably stands at a lock now."""
    return bool(
        count_of(
            conn,
            "select count(*) from pg_stat_activity where pid = %s and wait_event_type = 'Lock'",
            (pid,),
        )
    )


def reapers_waiting(conn: Connection) -> list[int]:
    """Backends of reapers in this database that stand at a lock now."""
    rows = conn.execute(
        "select pid from pg_stat_activity where application_name = 'job-reaper' and datname ="
        " current_database() and wait_event_type = 'Lock'"
    )
    return [pid for (pid,) in rows]
