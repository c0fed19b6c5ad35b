"""What looks odd and must simply work: the reaper is a guest in tables that belong to the app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from psycopg import sql

from reconciler.migrate import migrate
from tests.factories import a_job, the_events, the_job
from tests.postgres import Connection
from tests.reaping import BOTH_TABLES, by_status, count_of, many_expired, once, one_pass, settings_for

pytestmark = pytest.mark.every_postgres

NASTY = (
    "o'brien",
    'say "hi"',
    "50% off %s %(id)s",
    "zażółć 🐘",
    "back\\slash",
    "semi;colon--",
    " ",
    "{id}",
    "a" * 900,
)


def drop_partial_indexes(conn: Connection, table: str = "jobs") -> None:
    """Their predicates hold the status as text; a column of another type is the app's business."""
    conn.execute(
        f"do $$ declare i text; begin for i in select indexrelid::regclass from pg_index where indpred"
        f" is not null and indrelid = '{table}'::regclass loop execute 'drop index ' || i; end loop;"
        " end $$".encode()
    )


def retyped(conn: Connection, column: str, kind: str, default: str | None = None) -> None:
    drop_partial_indexes(conn)
    conn.execute(f"alter table jobs alter {column} drop default".encode())
    conn.execute(f"alter table jobs alter {column} type {kind} using {column}::text::{kind}".encode())
    if default is not None:
        conn.execute(f"alter table jobs alter {column} set default {default}".encode())


def new_ids(conn: Connection, kind: str, table: str = "jobs") -> None:
    conn.execute(f"alter table {table} drop column id cascade".encode())
    conn.execute(f"alter table {table} add column id {kind} primary key".encode())


# ── values ──────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_or_missing_stage_is_reaped_by_the_default_lease(dsn: str, conn: Connection) -> None:
    for stage in (None, "", "no such stage", *NASTY):
        a_job(conn, stage=stage, expected_ms=1000)
    assert one_pass(dsn).ok
    assert by_status(conn) == {"queued": 3 + len(NASTY)}
    assert {event["details"]["stage"] for event in the_events(conn)} == {None, "", "no such stage", *NASTY}


def test_nulls_everywhere_are_tolerated(dsn: str, conn: Connection) -> None:
    for column in ("attempt_count", "attempts_refunded", "max_attempts"):
        conn.execute(f"alter table jobs alter {column} drop not null, alter {column} drop default".encode())
    expired = a_job(conn, locked_by=None, beat_age=None, start_age=None, attempt=None, max_attempts=None)
    stale = a_job(conn, locked_by=None, lease_age=None, start_age=None, attempt=None, max_attempts=None)
    bare = a_job(conn, locked_by=None, lease_age=None, beat_age=None, start_age=None, attempt=None)
    conn.execute("update jobs set attempts_refunded = null")
    report = one_pass(dsn).tables["jobs"]
    assert report.ok
    assert [the_job(conn, job)["status"] for job in (expired, stale, bare)] == [
        "queued",
        "queued",
        "processing",
    ]
    assert [the_job(conn, job)["attempt_count"] for job in (expired, stale)] == [None, 1]
    assert report.counts["unleased"] == 1


def test_stamps_at_the_ends_of_time_are_judged_not_choked_on(dsn: str, conn: Connection) -> None:
    ends = ("'-infinity'", "'infinity'", "'4714-11-24 00:00:00+00 BC'", "'294276-12-31 00:00:00+00'", "null")
    for lease in ends:
        for beat in ends:
            conn.execute(
                "insert into jobs (status, lease_expires_at, last_heartbeat_at, processing_started_at)"
                f" select 'processing', {lease}, {beat}, s::timestamptz"
                f" from unnest(array[{','.join(ends)}]) as s".encode()
            )
    for size in (1, 3, 5000):
        report = one_pass(dsn, {"batch.size": size}, dry_run=True).tables["jobs"]
        assert report.ok
        assert report.poisoned == []
        seen = {name: report.counts[name] for name in ("requeued", "unleased")}
        assert sum(seen.values()) > 50
    assert one_pass(dsn, {"batch.size": 3}).tables["jobs"].ok
    assert one_pass(dsn).tables["jobs"].counts["requeued"] == 0, "nothing is found twice"


def test_text_ids_with_quotes_and_unicode_travel_unharmed(dsn: str, conn: Connection) -> None:
    new_ids(conn, "text")
    for name in NASTY:
        a_job(conn, id=name, locked_by=name)
    done = once(dsn, REAPER_BATCH_SIZE="2")
    assert done.code == 0
    assert set(done.json["tables"]["jobs"]["requeued"]) == set(NASTY)
    for name in NASTY:
        (event,) = the_events(conn, name)
        assert event["details"]["locked_by"] == name


@pytest.mark.parametrize("kind", ["bigint", "int", "smallint", "text", "varchar(40)", "char(8)", "numeric"])
def test_ids_of_any_kind_work_with_a_text_job_id(dsn: str, conn: Connection, kind: str) -> None:
    new_ids(conn, kind)
    largest = {"bigint": 2**63 - 1, "int": 2**31 - 1, "numeric": 10**30}.get(kind, 32_767)
    ids = [1, 2, 10, 100, largest]
    for number in ids:
        a_job(conn, id=str(number) if kind[0] in "tvc" else number)
    report = one_pass(dsn, {"batch.size": 2}).tables["jobs"]
    assert report.ok
    assert {int(str(job)) for job in report.requeued_ids} == set(ids)
    assert {int(row[0]) for row in conn.execute("select job_id from job_events").fetchall()} == set(ids)


@pytest.mark.parametrize("kind", ["uuid", "text", "varchar(36)"])
def test_the_event_table_may_have_an_id_of_another_type(dsn: str, conn: Connection, kind: str) -> None:
    conn.execute(f"alter table job_events alter job_id type {kind} using job_id::{kind}".encode())
    job = a_job(conn)
    assert one_pass(dsn).ok
    assert count_of(conn, "select count(*) from job_events where job_id::text = %s", (str(job),)) == 1


def test_an_id_that_does_not_fit_the_event_table_is_never_cut_off(dsn: str, conn: Connection) -> None:
    conn.execute("alter table job_events alter job_id type varchar(10)")
    job = a_job(conn)
    report = one_pass(dsn).tables["jobs"]
    assert [row.id for row in report.poisoned] == [str(job)]
    assert "too long" in report.poisoned[0].error
    assert the_job(conn, job)["status"] == "processing"


def test_payloads_of_ten_megabytes_stay_where_they_are(dsn: str, conn: Connection) -> None:
    conn.execute("alter table jobs add payload text")
    conn.execute("alter table jobs alter payload set storage external")
    for _ in range(3):
        a_job(conn, payload="x" * 10_000_000)
    assert one_pass(dsn).tables["jobs"].counts["requeued"] == 3
    assert count_of(conn, "select min(length(payload)) from jobs") == 10_000_000


# ── names ───────────────────────────────────────────────────────────────────────────────────────────


def test_names_that_need_quoting_are_quoted(empty_dsn: str) -> None:
    import psycopg

    schema, table, events = 'My "App" 100%', 'Jobs; drop table "x" %s', "Ereignisse {0} ü"
    columns = {"id": "Job-Id", "status": "the state%", "leaseExpiresAt": "LEASE", "lockedBy": 'locked "by"'}
    keys: Mapping[str, object] = {
        "tables.jobs.schema": schema,
        "tables.jobs.table": table,
        "tables.jobs.events.schema": schema,
        "tables.jobs.events.table": events,
        "tables.jobs.events.jobId": "select",
        "tables.jobs.events.data": "%(data)s",
        "state.schema": schema,
        "state.table": "State %",
        **{f"tables.jobs.columns.{role}": name for role, name in columns.items()},
    }
    settings = settings_for(empty_dsn, keys, REAPER_TABLES="jobs")
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))
        migrate(
            empty_dsn,
            settings.table_specs(),
            state_schema=settings.state_schema,
            state_table=settings.state_table,
        )
        insert = sql.SQL(
            "insert into {} ({}, {}, {}) values ('processing', 'w', now() - interval '1 min') returning {}"
        ).format(
            sql.Identifier(schema, table),
            *(sql.Identifier(columns[role]) for role in ("status", "lockedBy", "leaseExpiresAt", "id")),
        )
        job = conn.execute(insert).fetchone()
        assert job is not None
        report = one_pass(empty_dsn, keys, REAPER_TABLES="jobs")
        assert report.tables["jobs"].error is None
        assert report.tables["jobs"].requeued_ids == [str(job[0])]
        read = sql.SQL("select {} from {}").format(sql.Identifier("%(data)s"), sql.Identifier(schema, events))
        assert [row[0]["type"] for row in conn.execute(read).fetchall()] == ["reaper:requeued"]


def test_other_words_for_the_states_are_configuration(dsn: str, conn: Connection) -> None:
    words = {"queued": "it's waiting", "processing": "RUNNING", "done": "OK", "failed": "100% broken"}
    jobs = [a_job(conn, status="RUNNING"), a_job(conn, status="RUNNING", attempt=3)]
    ours = a_job(conn, status="processing")
    assert one_pass(dsn, {f"tables.jobs.statuses.{key}": word for key, word in words.items()}).ok
    assert [the_job(conn, job)["status"] for job in jobs] == ["it's waiting", "100% broken"]
    assert the_job(conn, ours)["status"] == "processing", "that word means nothing here"


# ── tables of another make ──────────────────────────────────────────────────────────────────────────


def test_a_status_that_is_an_enum_works(dsn: str, conn: Connection) -> None:
    conn.execute("create type \"Job State\" as enum ('queued', 'processing', 'done', 'failed')")
    retyped(conn, "status", '"Job State"')
    jobs = [a_job(conn), a_job(conn, attempt=3)]
    assert one_pass(dsn).ok
    assert [the_job(conn, job)["status"] for job in jobs] == ["queued", "failed"]


def test_columns_of_varchar_and_domains_work(dsn: str, conn: Connection) -> None:
    conn.execute("create domain word as varchar(40) check (value <> '')")
    retyped(conn, "status", "word", "'queued'")
    for column in ("locked_by", "fail_code", "fail_reason", "stage"):
        retyped(conn, column, "varchar(60)")
    jobs = [a_job(conn), a_job(conn, attempt=3), a_job(conn, lease_age=None, attempt=3)]
    assert one_pass(dsn).ok
    assert [the_job(conn, job)["status"] for job in jobs] == ["queued", "failed", "failed"]


def test_an_attempt_count_at_the_end_of_its_type_does_not_overflow(dsn: str, conn: Connection) -> None:
    conn.execute("alter table jobs alter attempt_count type smallint, alter max_attempts type bigint")
    expired = a_job(conn, attempt=32_767, max_attempts=10**6)
    stale = a_job(conn, lease_age=None, attempt=32_767, max_attempts=10**6)
    assert one_pass(dsn).ok
    for job in (expired, stale):
        row = the_job(conn, job)
        assert (row["status"], row["attempt_count"]) == ("queued", 32_767)


def test_a_table_without_max_attempts_uses_the_configured_number(dsn: str, conn: Connection) -> None:
    jobs = [a_job(conn, attempt=1), a_job(conn, attempt=2)]
    conn.execute("alter table jobs drop max_attempts")
    assert one_pass(dsn, JOB_MAX_ATTEMPTS="2").ok
    assert [the_job(conn, job)["status"] for job in jobs] == ["queued", "failed"]


@pytest.mark.parametrize("kind", ["json", "text"])
def test_event_data_may_be_json_or_text(dsn: str, conn: Connection, kind: str) -> None:
    conn.execute(f"alter table job_events alter data type {kind} using data::text::{kind}".encode())
    a_job(conn, locked_by='w"1')
    assert one_pass(dsn).tables["jobs"].error is None
    data: Any = count_of(conn, "select data::jsonb from job_events")
    assert (data["type"], data["details"]["locked_by"]) == ("reaper:requeued", 'w"1')


@pytest.mark.parametrize("by", ["list (status)", "range (created_at)", "hash (id)"])
def test_partitioned_tables_are_served_even_when_a_row_moves_to_another_partition(
    dsn: str, conn: Connection, by: str
) -> None:
    conn.execute("drop table jobs cascade")
    conn.execute(
        "create table jobs (id uuid not null default gen_random_uuid(), status text default 'queued',"
        f" created_at timestamptz not null default now()) partition by {by}".encode()
    )
    parts = {
        "list (status)": ["for values in ('processing')", "default"],
        "range (created_at)": ["for values from ('2020-01-01') to ('2021-01-01')", "default"],
        "hash (id)": [f"for values with (modulus 2, remainder {n})" for n in (0, 1)],
    }[by]
    for n, bounds in enumerate(parts):
        conn.execute(f"create table jobs_{n} partition of jobs {bounds}".encode())
    migrate(dsn)
    jobs = [a_job(conn, created_at=year) for year in ("2020-06-01", "2026-01-01") for _ in range(5)]
    spent = a_job(conn, attempt=3)
    report = one_pass(dsn, {"batch.size": 3}).tables["jobs"]
    assert report.ok
    assert set(report.requeued_ids) == {str(job) for job in jobs}
    assert report.failed_ids == [str(spent)]
    assert count_of(conn, "select count(distinct job_id) from job_events") == 11


def test_triggers_of_the_app_fire_and_do_not_mislead(dsn: str, conn: Connection) -> None:
    conn.execute(
        """
        alter table jobs add updated_at timestamptz;
        create function nothing() returns trigger language plpgsql as $$ begin return null; end $$;
        create table audit (job text, was text, now text);
        create function touch() returns trigger language plpgsql as $$ begin
            new.updated_at := now(); return new; end $$;
        create function log() returns trigger language plpgsql as $$ begin
            insert into audit values (new.id, old.status, new.status); return null; end $$;
        create function tell() returns trigger language plpgsql as $$ begin
            perform pg_notify('jobs', (select count(*)::text from changed)); return null; end $$;
        create trigger touch before update on jobs for each row execute function touch();
        create trigger log after update on jobs for each row execute function log();
        create trigger tell after update on jobs referencing new table as changed
            for each statement execute function tell();
        create constraint trigger late after insert on job_events deferrable initially deferred
            for each row execute function nothing();
        """
    )
    job = a_job(conn)
    assert one_pass(dsn).ok
    assert the_job(conn, job)["updated_at"] is not None
    assert conn.execute("select * from audit").fetchall() == [(str(job), "processing", "queued")]


def test_both_tables_may_be_one_schema_over_and_share_their_events(dsn: str, conn: Connection) -> None:
    conn.execute("create schema app")
    for table in BOTH_TABLES:
        conn.execute(f"alter table {table} set schema app".encode())
    conn.execute("alter table job_events set schema app")
    many_expired(conn, 3, "app.jobs")
    many_expired(conn, 2, "app.asr_jobs")
    report = one_pass(dsn + "&options=-c%20search_path%3Dapp%2Cpublic")
    assert {name: table.counts["requeued"] for name, table in report.tables.items()} == {
        "jobs": 3,
        "asr_jobs": 2,
    }
