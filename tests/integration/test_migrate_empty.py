"""`migrate` on an empty database, its dry run and its bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest

from reconciler import migrate_files
from reconciler.errors import ConfigError, DatabaseError, MigrationError
from reconciler.migrate import DEFAULT_TABLES, migrate
from reconciler.migrate_files import Migration, migrations
from reconciler.model import TableSpec
from tests.integration.schema_facts import fingerprint, the_columns, the_indexes
from tests.postgres import Connection

COLUMNS = {
    "id": "uuid not null default gen_random_uuid()",
    "status": "text not null default 'queued'::text",
    "locked_by": "text",
    "lease_expires_at": "timestamp with time zone",
    "last_heartbeat_at": "timestamp with time zone",
    "processing_started_at": "timestamp with time zone",
    "attempt_count": "integer not null default 0",
    "max_attempts": "integer not null default 3",
    "attempts_refunded": "integer not null default 0",
    "fail_code": "text",
    "fail_reason": "text",
    "stage": "text",
    "next_earliest_run_at": "timestamp with time zone",
    "expected_duration_ms": "integer",
}


@pytest.fixture
def empty(empty_dsn: str) -> Iterator[Connection]:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        yield connection


@pytest.mark.every_postgres
def test_an_empty_database_gets_the_columns_and_indexes_of_the_documents(
    empty_dsn: str, empty: Connection
) -> None:
    report = migrate(empty_dsn)

    for table in ("jobs", "asr_jobs"):
        assert the_columns(empty, table) == COLUMNS
        assert the_indexes(empty, table) == {
            f"idx_{table}_status_lease": "btree (status, lease_expires_at)",
            f"{table}_status_last_heartbeat_at_idx": "btree (status, last_heartbeat_at)",
            f"idx_{table}_queued": "btree (next_earliest_run_at, id) WHERE (status = 'queued'::text)",
        }
    assert the_columns(empty, "job_events") == {
        "id": "bigint not null",
        "job_id": "text not null",
        "data": "jsonb not null",
        "created_at": "timestamp with time zone not null default now()",
    }
    assert the_columns(empty, "reaper_state") == {
        "scope": "text not null",
        "holder": "text",
        "until": "timestamp with time zone",
        "last_success_at": "timestamp with time zone",
        "resumed_at": "timestamp with time zone",
        "counters": "jsonb not null default '{}'::jsonb",
        "updated_at": "timestamp with time zone not null default now()",
    }
    assert report.skipped == ()
    assert report.warnings == ()
    assert "create index idx_jobs_status_lease" in report.applied


@pytest.mark.every_postgres
def test_a_second_run_changes_nothing_and_says_why(empty_dsn: str, empty: Connection) -> None:
    migrate(empty_dsn)
    before = fingerprint(empty)

    report = migrate(empty_dsn)

    assert report.applied == ()
    assert ("005_lease_columns public.jobs", "every column is there") in report.skipped
    assert fingerprint(empty) == before


def test_the_configured_number_of_attempts_becomes_the_columns_default(
    empty_dsn: str, empty: Connection
) -> None:
    migrate(empty_dsn, default_max_attempts=7)
    assert the_columns(empty)["max_attempts"] == "integer not null default 7"


def test_a_dry_run_shows_the_sql_and_changes_nothing(empty_dsn: str, empty: Connection) -> None:
    before = fingerprint(empty)
    report = migrate(empty_dsn, dry_run=True)

    assert report.applied == ()
    assert fingerprint(empty) == before
    assert report.planned[0] == "create table public.reaper_migrations"
    for statement in report.sql:  # what it shows is what brings the schema: nothing is missing afterwards
        empty.execute(statement.encode())
    assert migrate(empty_dsn).applied == ()


def test_a_dry_run_plans_exactly_the_steps_a_run_takes(empty_dsn: str) -> None:
    planned = migrate(empty_dsn, dry_run=True).planned
    assert migrate(empty_dsn).applied == planned


def test_a_dry_run_of_the_other_index_set_changes_nothing_either(dsn: str, conn: Connection) -> None:
    before = fingerprint(conn)
    report = migrate(dsn, heartbeats="hot", dry_run=True)
    assert any("DROP INDEX CONCURRENTLY" in statement for statement in report.sql)
    assert fingerprint(conn) == before


def test_a_dry_run_waits_for_no_lock_and_for_no_other_migration(dsn: str, conn: Connection) -> None:
    with conn.transaction():
        conn.execute("lock table jobs, asr_jobs, job_events in row exclusive mode")
        conn.execute("select pg_advisory_lock(%s)", (_lock_key(),))
        report = migrate(dsn, heartbeats="hot", dry_run=True)
    assert report.sql


def test_a_dry_run_of_a_finished_database_shows_nothing(dsn: str) -> None:
    assert migrate(dsn, dry_run=True).sql == ()


def test_an_edited_migration_is_noticed_before_anything_is_changed(
    empty_dsn: str, empty: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(empty_dsn)
    empty.execute("drop index idx_jobs_status_lease")
    before = fingerprint(empty)
    edited = _with(replace(migrations()["005_lease_columns"], checksum="0" * 64))
    monkeypatch.setattr("reconciler.migrate_plan.migrations", lambda: edited)

    with pytest.raises(MigrationError, match=r"005_lease_columns\.sql was edited after it was applied"):
        migrate(empty_dsn)
    assert fingerprint(empty) == before


def test_a_database_of_a_newer_release_is_refused(dsn: str, conn: Connection) -> None:
    conn.execute("insert into reaper_migrations values ('099_future', 'public.jobs', 'x')")
    with pytest.raises(MigrationError, match=r"099_future was applied .* by a newer job-reaper"):
        migrate(dsn)


def test_a_checksum_ignores_comments_and_blank_space_but_no_word() -> None:
    one = migrate_files.parse("001_x.sql", "-- why\n-- name: a\n-- more\nSELECT 1;\n")
    same = migrate_files.parse("001_x.sql", "-- name: a\nSELECT   1; -- better said\n\n")
    other = migrate_files.parse("001_x.sql", "-- name: a\nSELECT 2;\n")
    assert one.checksum == same.checksum != other.checksum


def test_an_index_somebody_dropped_is_made_again(dsn: str, conn: Connection) -> None:
    conn.execute("drop index idx_jobs_status_lease")
    assert migrate(dsn).applied == ("create index idx_jobs_status_lease",)


def test_lost_bookkeeping_is_written_again_from_what_is_there(dsn: str, conn: Connection) -> None:
    before = conn.execute("select step, target from reaper_migrations order by 1, 2").fetchall()
    conn.execute("drop table reaper_migrations")
    assert migrate(dsn).applied == ("create table public.reaper_migrations",)
    assert conn.execute("select step, target from reaper_migrations order by 1, 2").fetchall() == before


def test_our_own_tables_can_live_in_a_schema_of_their_own(empty_dsn: str, empty: Connection) -> None:
    empty.execute('create schema "Reaper"')
    migrate(empty_dsn, state_schema="Reaper", state_table="memory")
    assert "scope" in the_columns(empty, '"Reaper".memory')
    assert "step" in the_columns(empty, '"Reaper".reaper_migrations')
    assert migrate(empty_dsn, state_schema="Reaper", state_table="memory").applied == ()


def test_a_schema_that_does_not_exist_is_refused(empty_dsn: str, empty: Connection) -> None:
    before = fingerprint(empty)
    with pytest.raises(
        MigrationError, match=r"no schema for jobs: create it, or correct tables\.jobs\.schema"
    ):
        migrate(empty_dsn, [TableSpec("jobs", "jobs", "nowhere")])
    assert fingerprint(empty) == before


def test_a_foreign_table_called_reaper_state_is_refused(empty_dsn: str, empty: Connection) -> None:
    empty.execute("create table reaper_state (id int)")
    with pytest.raises(MigrationError, match="exists without scope, holder"):
        migrate(empty_dsn)


def test_an_unreachable_database_is_a_database_error() -> None:
    with pytest.raises(DatabaseError, match="is the database up"):
        migrate("host=/nonexistent dbname=x")


def test_a_wrong_dsn_is_a_configuration_error_that_does_not_show_it() -> None:
    with pytest.raises(ConfigError) as caught:
        migrate("postgresql://u:secret@[bad")
    assert "secret" not in str(caught.value)


def test_a_read_only_database_is_refused(dsn: str, conn: Connection) -> None:
    conn.execute(f"alter database {conn.info.dbname} set default_transaction_read_only = on".encode())
    with pytest.raises(MigrationError, match="read-only: point DATABASE_URL at the primary"):
        migrate(dsn)


def test_the_default_tables_are_the_documents() -> None:
    assert [spec.name for spec in DEFAULT_TABLES] == ["jobs", "asr_jobs"]


def _with(changed: Migration) -> dict[str, Migration]:
    return {**migrations(), changed.name: changed}


def _lock_key() -> int:
    from reconciler.migrate_session import LOCK_KEY

    return LOCK_KEY
