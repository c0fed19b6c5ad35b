"""Real Postgres servers for the tests: one per major and xdist worker, a fresh database per test.

A server starts when the first test needs it. Each holds a template database, migrated once; a test gets a
clone of it (some 30 ms) and the clone is dropped afterwards. Databases are never shared between tests, so a
test may break its own in any way it likes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, LiteralString
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

from reconciler.demo.postgres import (
    EmbeddedPostgres,
    Installation,
    newest_of_each_major,
    server_identity,
)
from reconciler.migrate import migrate
from tests.ci import in_ci

TEMPLATE = "reaper_template"
Connection = psycopg.Connection[Any]


# ── which servers ───────────────────────────────────────────────────────────────────────────────────


def installations_for(choice: str | None, *, every_major: bool) -> list[Installation]:
    """The servers one test runs on, by `--postgres` and by whether the test asks for every major."""
    found = newest_of_each_major()
    if not found:
        raise pytest.UsageError("no Postgres found: run scripts/setup, or apt-get install postgresql")
    if in_ci() and len(found) < 2:
        raise pytest.UsageError(
            f"CI needs at least two majors of Postgres, found only {found[0].major} in {found[0].bin_dir}: "
            "run scripts/ci-packages and scripts/setup"
        )
    if choice == "all" or (choice is None and every_major):
        return found
    if choice in (None, "newest"):
        return found[:1]
    chosen = [installation for installation in found if str(installation.major) == choice]
    if not chosen:
        majors = ", ".join(str(installation.major) for installation in found)
        raise pytest.UsageError(f"--postgres={choice}: allowed are all, newest, {majors}")
    return chosen


# ── one server ──────────────────────────────────────────────────────────────────────────────────────


class Server:
    """A running Postgres with a migrated template in it."""

    def __init__(self, postgres: EmbeddedPostgres, admin: Connection) -> None:
        self.postgres = postgres
        self.major = postgres.installation.major
        self._admin = admin
        self._numbers = count(1)
        self._has_template = False

    @contextmanager
    def database(self, *, template: str | None = TEMPLATE) -> Iterator[str]:
        """The DSN of a fresh database: a clone of the migrated template, or empty with `template=None`."""
        if template == TEMPLATE and not self._has_template:
            self._create_template()
        name = f"test_{next(self._numbers)}"
        self._run("create database {} template {}", name, template or "template0")
        try:
            yield self.postgres.dsn_for(name)
        finally:
            self._run("drop database if exists {} with (force)", name)

    def _create_template(self) -> None:
        self._run("create database {} template {}", TEMPLATE, "template0")
        migrate(self.postgres.dsn_for(TEMPLATE))
        self._has_template = True

    def _run(self, statement: LiteralString, *names: str) -> None:
        if self._admin.closed:  # a test killed or restarted the server
            self._admin = psycopg.connect(self.postgres.dsn, autocommit=True)
        try:
            self._admin.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
        except psycopg.OperationalError:
            self._admin.close()
            self._admin = psycopg.connect(self.postgres.dsn, autocommit=True)
            self._admin.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def close(self) -> None:
        self._admin.close()


class ServerPool:
    """The servers of this pytest process, started when first asked for."""

    def __init__(self) -> None:
        self._resources = ExitStack()
        self._servers: dict[Path, Server] = {}

    def get(self, installation: Installation) -> Server:
        if installation.bin_dir not in self._servers:
            postgres = self._resources.enter_context(EmbeddedPostgres(installation))
            server = Server(postgres, psycopg.connect(postgres.dsn, autocommit=True))
            self._resources.callback(server.close)
            self._servers[installation.bin_dir] = server
        return self._servers[installation.bin_dir]

    def close(self) -> None:
        self._resources.close()


# ── PgBouncer ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PgBouncer:
    """A running PgBouncer; `dsn` leads to the test's database through it."""

    dsn: str
    pid: int
    log_path: Path


@contextmanager
def running_pgbouncer(dsn: str, *, pool_mode: str = "transaction", pool_size: int = 2) -> Iterator[PgBouncer]:
    """PgBouncer before one database. The pool is small on purpose: leaking session state shows."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        message = "no pgbouncer on this machine: apt-get install pgbouncer (scripts/ci-packages does)"
        if in_ci():
            pytest.fail(message)
        pytest.skip(message)
    target = psycopg.conninfo.conninfo_to_dict(dsn)
    with tempfile.TemporaryDirectory(prefix="bouncer-", dir="/tmp") as directory:
        base = Path(directory)
        (base / "pgbouncer.ini").write_text(
            f"""
[databases]
* = host={target["host"]} port={target.get("port", 5432)} user={target["user"]}
[pgbouncer]
listen_addr =
unix_socket_dir = {base}
listen_port = 6432
auth_type = any
pool_mode = {pool_mode}
default_pool_size = {pool_size}
max_client_conn = 200
logfile = {base}/pgbouncer.log
"""
        )
        arguments: dict[str, Any] = {}
        if (identity := server_identity()) is not None:
            for path in (base, base / "pgbouncer.ini"):
                os.chown(path, identity.pw_uid, identity.pw_gid)
            arguments = {"user": identity.pw_uid, "group": identity.pw_gid, "extra_groups": []}
        process = subprocess.Popen(
            [program, "--quiet", str(base / "pgbouncer.ini")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            **arguments,
        )
        try:
            wait_until(
                (base / ".s.PGSQL.6432").exists,
                lambda: f"pgbouncer did not start: {process.poll()} {_text(base / 'pgbouncer.log')}",
            )
            name = quote(str(target["dbname"]), safe="")
            url = f"postgresql://{target['user']}@/{name}?host={quote(directory)}&port=6432"
            yield PgBouncer(url, process.pid, base / "pgbouncer.log")
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=10)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else "(no log)"


# ── waiting ─────────────────────────────────────────────────────────────────────────────────────────


def wait_until(
    condition: Any, otherwise: Any = "the condition did not come true", *, timeout_sec: float = 20.0
) -> Any:
    """Poll until the condition is true and return its value; fail the test with a reason if it never is."""
    deadline = time.monotonic() + timeout_sec
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(str(otherwise() if callable(otherwise) else otherwise))
        time.sleep(0.01)
    return value
