"""A migrated database of its own for each test, and connections to it."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.postgres import Connection, PgBouncer, Server, running_pgbouncer


@pytest.fixture
def dsn(pg_server: Server) -> Iterator[str]:
    """A database with the newest schema and no rows."""
    with pg_server.database() as url:
        yield url


@pytest.fixture
def empty_dsn(pg_server: Server) -> Iterator[str]:
    """A database without any table: what an operator starts from."""
    with pg_server.database(template=None) as url:
        yield url


@pytest.fixture
def conn(dsn: str) -> Iterator[Connection]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def other_conn(dsn: str) -> Iterator[Connection]:
    """A second session, for races."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def pgbouncer(dsn: str) -> Iterator[PgBouncer]:
    """A real PgBouncer in transaction mode before the test's database; use `pgbouncer.dsn`."""
    with running_pgbouncer(dsn) as bouncer:
        yield bouncer
