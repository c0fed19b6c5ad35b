"""`migrate` on a database whose app owns the tables: nothing of the app's is altered, the rest fits in."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from reconciler.errors import MigrationError
from reconciler.migrate import migrate
from reconciler.model import Columns, EventsSpec, Statuses, TableSpec
from reconciler.shape import read_shape
from tests.integration.schema_facts import fingerprint, storage, the_columns, the_indexes
from tests.postgres import Connection

JOBS = (TableSpec("jobs", "jobs"),)
ROWS = 2000


@pytest.fixture
def app(empty_dsn: str) -> Iterator[Connection]:
    """The app's own session in its own database."""
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        yield connection


@pytest.mark.every_postgres
@pytest.mark.parametrize(
    ("id_type", "id_value"),
    [
        ("uuid", "gen_random_uuid()"),
        ("bigint", "n"),
        ("text", "'job ''' || n || ' ✓'"),
        ("varchar(40)", "n::text"),
    ],
)
def test_an_apps_table_keeps_its_rows_and_its_file_and_gains_the_columns(
    empty_dsn: str, app: Connection, id_type: str, id_value: str
) -> None:
    app.execute(
        f"""
        create table jobs (id {id_type} primary key, status text, payload jsonb, at timestamp default now());
        insert into jobs (id, status, payload)
        select {id_value}, 'queued', '{{"n": 1}}' from generate_series(1, {ROWS}) as n
        """.encode()
    )
    before = storage(app, "jobs")
    old = the_columns(app)

    migrate(empty_dsn, JOBS)

    assert storage(app, "jobs") == before, "the table was rewritten"
    assert old.items() <= the_columns(app).items()
    assert app.execute("select count(*), sum(attempt_count), min(max_attempts) from jobs").fetchone() == (
        ROWS,
        0,
        3,
    )
    assert read_shape(app, JOBS[0]).id_type.startswith(
        id_type.split("(", maxsplit=1)[0].replace("varchar", "character varying")
    )


def test_names_that_need_quoting_are_quoted(empty_dsn: str, app: Connection) -> None:
    app.execute(
        '''
        create schema "My App";
        create table "My App"."Job ""Queue""" ("jobId" bigint primary key, "State" text);
        create table "My App"."Events" ("jobId" text, "Data" jsonb)
        '''
    )
    columns = Columns(id="jobId", status="State", lease_expires_at="leaseEnd", locked_by="lockedBy%s")
    events = EventsSpec("Events", "My App", "jobId", "Data")
    spec = TableSpec("q", 'Job "Queue"', "My App", columns, Statuses(processing="it's running"), events)

    migrate(empty_dsn, [spec], heartbeats="hot")
    migrate(empty_dsn, [spec], heartbeats="default")

    name = '"My App"."Job ""Queue"""'
    assert {"leaseEnd", "lockedBy%s", "attempts_refunded"} <= the_columns(app, name).keys()
    assert the_indexes(app, name) == {
        'idx_Job "Queue"_status_lease': 'btree ("State", "leaseEnd")',
        'Job "Queue"_State_last_heartbeat_at_idx': 'btree ("State", last_heartbeat_at)',
        'idx_Job "Queue"_queued': 'btree (next_earliest_run_at, "jobId") WHERE ("State" = \'queued\'::text)',
    }
    assert migrate(empty_dsn, [spec]).applied == ()


def test_a_table_name_of_63_bytes_gets_index_names_that_fit(empty_dsn: str, app: Connection) -> None:
    specs = [TableSpec(str(n), "ж" * 30 + f"_{n}") for n in range(2)]
    migrate(empty_dsn, specs)
    names = [name for spec in specs for name in the_indexes(app, f'"{spec.table}"')]
    assert len(names) == len(set(names)) == 6
    assert all(len(name.encode()) <= 63 for name in names)
    assert migrate(empty_dsn, specs).applied == ()


def test_an_enum_status_with_the_apps_words_works(empty_dsn: str, app: Connection) -> None:
    app.execute(
        """
        create type state as enum ('WAITING', 'RUNNING', 'OK', 'BROKEN');
        create table jobs (id bigint primary key, status state not null)
        """
    )
    words = Statuses("WAITING", "RUNNING", "OK", "BROKEN")
    spec = TableSpec("jobs", "jobs", statuses=words)
    migrate(empty_dsn, [spec], heartbeats="hot")
    assert the_indexes(app)["idx_jobs_processing"] == "btree (id) WHERE (status = 'RUNNING'::state)"
    assert migrate(empty_dsn, [spec]).applied == ()


def test_an_index_on_the_same_columns_is_used_whatever_its_name(empty_dsn: str, app: Connection) -> None:
    app.execute(
        """
        create table jobs (
            id uuid primary key, status text, last_heartbeat_at timestamptz, lease_expires_at timestamptz);
        create index by_beat on jobs (status, last_heartbeat_at);
        create index by_lease on jobs (status, lease_expires_at, id)
        """
    )
    report = migrate(empty_dsn, JOBS)
    assert the_indexes(app).keys() == {"by_beat", "by_lease", "idx_jobs_queued"}
    assert ("007_index_status_heartbeat public.jobs", "by_beat does the same") in report.skipped


@pytest.mark.parametrize(
    "definition",
    [
        "(status, last_heartbeat_at desc)",
        "(status, last_heartbeat_at) where status <> 'done'",
        "(last_heartbeat_at, status)",
        "(status text_pattern_ops, last_heartbeat_at)",
        "(lower(status), last_heartbeat_at)",
        "using brin (status, last_heartbeat_at)",
    ],
)
def test_an_index_that_only_looks_alike_is_not_relied_upon(
    empty_dsn: str, app: Connection, definition: str
) -> None:
    app.execute("create table jobs (id uuid primary key, status text, last_heartbeat_at timestamptz)")
    app.execute(f"create index alike on jobs {definition}".encode())
    migrate(empty_dsn, JOBS)
    assert the_indexes(app).keys() >= {"alike", "jobs_status_last_heartbeat_at_idx"}


def test_a_name_that_another_index_has_is_told_before_anything_is_changed(
    empty_dsn: str, app: Connection
) -> None:
    app.execute("create table jobs (id uuid primary key, status text)")
    app.execute("create index idx_jobs_status_lease on jobs (status)")
    before = fingerprint(app)
    with pytest.raises(MigrationError, match=r"public\.idx_jobs_status_lease is taken.*Rename it"):
        migrate(empty_dsn, JOBS)
    assert fingerprint(app) == before


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("lease_expires_at timestamp", "only timestamptz says which instant is meant.*AT TIME ZONE 'UTC'"),
        ("last_heartbeat_at bigint", "last_heartbeat_at is bigint"),
        ("attempt_count text", "attempt_count is text; allowed are smallint, integer, bigint"),
        ("max_attempts numeric", "max_attempts is numeric"),
        ("locked_by uuid", "locked_by is uuid; allowed are text"),
        ("fail_code varchar(10)", "too short for RETRIES_EXHAUSTED"),
        ("locked_by text not null", "is NOT NULL, but a requeue clears it.*DROP NOT NULL"),
        ("fail_code text generated always as ('x') stored", "fail_code is generated"),
    ],
)
def test_a_column_that_cannot_hold_what_we_write_is_refused_and_nothing_is_changed(
    empty_dsn: str, app: Connection, columns: str, message: str
) -> None:
    app.execute(f"create table jobs (id uuid primary key, status text, {columns})".encode())
    before = fingerprint(app)
    with pytest.raises(MigrationError, match=message) as caught:
        migrate(empty_dsn)
    assert caught.value.code == "refused"
    assert fingerprint(app) == before


def test_every_problem_is_told_at_once(empty_dsn: str, app: Connection) -> None:
    app.execute("create table jobs (id point, status text, attempt_count text, lease_expires_at date)")
    app.execute("create view asr_jobs as select 1 as id")
    with pytest.raises(MigrationError) as caught:
        migrate(empty_dsn)
    text = str(caught.value)
    assert text.count("\n  - ") == 4
    assert "asr_jobs is a view, not a table" in text
    assert "jobs.id is point" in text


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("create materialized view jobs as select 1 as id", "is a materialized view, not a table"),
        ("create table jobs (key uuid, status text)", r"no column id: map .* tables\.jobs\.columns\.id"),
        ("create table jobs (id int primary key, state text)", r"no column status: .*columns\.status"),
        (
            "create type s as enum ('a', 'processing'); create table jobs (id int primary key, status s)",
            r"does not know the word 'queued': .*one of a, processing.*statuses\.queued",
        ),
        ("create table jobs (id int primary key, status varchar(8))", "too short for 'processing'"),
        (
            "create table p (id int, status text) partition by list (id);"
            " create table jobs partition of p default",
            "jobs is a partition: name the partitioned table",
        ),
        (
            "create table jobs (id uuid primary key, status text);"
            " create table job_events (job_id int, data jsonb)",
            r"jobs\.id cannot be cast to public\.job_events\.job_id \(integer\): make that column text",
        ),
        ("create table job_events (job_id text, data bytea)", "data is bytea; allowed are jsonb, json, text"),
        ("create table job_events (job text, data jsonb)", r"no column job_id: .*tables\.jobs\.events"),
        (
            "create table job_events (job_id text, data jsonb, kind text not null)",
            "demands kind, which job-reaper cannot fill",
        ),
        ('create table "Jobs" (id int, status text)', r'no table public\.jobs, but there is public\."Jobs"'),
        (
            "create schema app; create table app.jobs (id int)",
            r"no table public\.jobs, but there is app\.jobs",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_to_do(
    empty_dsn: str, app: Connection, setup: str, message: str
) -> None:
    app.execute(setup.encode())
    before = fingerprint(app)
    with pytest.raises(MigrationError, match=message):
        migrate(empty_dsn, JOBS)
    assert fingerprint(app) == before


@pytest.mark.parametrize(
    ("id_type", "job_id_type"),
    [
        ("uuid", "text"),
        ("bigint", "text"),
        ("bigint", "bigint"),
        ("int", "bigint"),
        ("uuid", "uuid"),
        ("text", "uuid"),
    ],
)
def test_an_apps_event_table_is_used_as_it_is(
    empty_dsn: str, app: Connection, id_type: str, job_id_type: str
) -> None:
    app.execute(
        f"""
        create table jobs (id {id_type} primary key, status text);
        create table job_events (id bigserial, job_id {job_id_type}, data json not null)
        """.encode()
    )
    before = the_columns(app, "job_events")
    migrate(empty_dsn, JOBS)
    assert the_columns(app, "job_events") == before
    assert the_indexes(app, "job_events") == {}


def test_a_role_that_does_not_own_the_table_is_told_who_does(empty_dsn: str, app: Connection) -> None:
    app.execute("create table jobs (id int primary key, status text)")
    app.execute("drop role if exists stranger")
    app.execute("create role stranger login")
    app.execute("grant create on schema public to stranger")
    dsn = psycopg.conninfo.make_conninfo(empty_dsn, user="stranger")
    try:
        with pytest.raises(MigrationError, match=r"jobs belongs to \w+, and role stranger may not alter it"):
            migrate(dsn, JOBS)
    finally:
        app.execute("drop owned by stranger")
        app.execute("drop role stranger")


def test_a_role_that_may_not_create_in_the_schema_is_told_the_grant(empty_dsn: str, app: Connection) -> None:
    app.execute("drop role if exists stranger")
    app.execute("create role stranger login")
    app.execute("revoke create on schema public from public")
    dsn = psycopg.conninfo.make_conninfo(empty_dsn, user="stranger")
    try:
        with pytest.raises(MigrationError, match="GRANT CREATE ON SCHEMA public TO stranger"):
            migrate(dsn, JOBS)
    finally:
        app.execute("drop owned by stranger")
        app.execute("drop role stranger")


def test_foreign_triggers_and_views_on_the_tables_do_no_harm(empty_dsn: str, app: Connection) -> None:
    app.execute(
        """
        create table jobs (id int primary key, status text);
        insert into jobs values (1, 'queued');
        create view seen as select * from jobs;
        create function no() returns trigger language plpgsql as $$ begin raise 'never'; end $$;
        create trigger no before insert or update or delete on jobs for each row execute function no();
        create trigger no_truncate before truncate on jobs execute function no()
        """
    )
    migrate(empty_dsn, JOBS, heartbeats="hot")
    assert app.execute("select * from seen").fetchall() == [(1, "queued")]


@pytest.mark.every_postgres
def test_a_partitioned_table_is_indexed_partition_by_partition(empty_dsn: str, app: Connection) -> None:
    app.execute(PARTITIONED)
    before = {name: storage(app, name) for name in ("jobs_old", "jobs_new_a")}

    report = migrate(empty_dsn, JOBS)

    assert {name: storage(app, name) for name in before} == before
    assert the_indexes(app, "jobs") == {
        "idx_jobs_status_lease": "btree (status, lease_expires_at)",
        "jobs_status_last_heartbeat_at_idx": "btree (status, last_heartbeat_at)",
        "idx_jobs_queued": "btree (next_earliest_run_at, id) WHERE (status = 'queued'::text)",
    }
    assert "CREATE INDEX ON ONLY" not in " ".join(report.applied)
    for partition in ("jobs_old", "jobs_new_a"):
        assert (
            the_indexes(app, partition)[f"idx_{partition}_status_lease"] == "btree (status, lease_expires_at)"
        )
    app.execute("create table jobs_later partition of jobs for values from (300) to (400)")
    assert len(the_indexes(app, "jobs_later")) == 3, "a partition made later takes its part in the indexes"
    assert migrate(empty_dsn, JOBS).applied == ()


def test_a_partitions_own_index_is_attached_instead_of_built_twice(empty_dsn: str, app: Connection) -> None:
    app.execute(PARTITIONED)
    app.execute("alter table jobs add lease_expires_at timestamptz")
    app.execute("create index mine on jobs_old (status, lease_expires_at)")
    migrate(empty_dsn, JOBS)
    assert "mine" in the_indexes(app, "jobs_old")
    assert "idx_jobs_old_status_lease" not in the_indexes(app, "jobs_old")
    assert not the_indexes(app)["idx_jobs_status_lease"].startswith("INVALID")


def test_a_partitioned_table_without_partitions_works(empty_dsn: str, app: Connection) -> None:
    app.execute("create table jobs (id int primary key, status text) partition by range (id)")
    migrate(empty_dsn, JOBS)
    assert not any(text.startswith("INVALID") for text in the_indexes(app).values())
    assert migrate(empty_dsn, JOBS).applied == ()


PARTITIONED = """
create table jobs (id int primary key, status text) partition by range (id);
create table jobs_old partition of jobs for values from (0) to (100);
create table jobs_new partition of jobs for values from (100) to (300) partition by range (id);
create table jobs_new_a partition of jobs_new for values from (100) to (200);
insert into jobs select n, 'queued' from generate_series(1, 199) as n;
"""
