"""What is refused: with a sentence that says what, which and what to do, the right exit code, nothing
changed, and the other table still served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.factories import a_job, the_events, the_job
from tests.postgres import Connection, Server
from tests.reaping import Ended, ended, once, one_pass, started


def refused_table(dsn: str, conn: Connection, **overrides: object) -> tuple[str, str]:
    """Code and message of a pass that must refuse `jobs`, change nothing there, and serve `asr_jobs`."""
    other = a_job(conn, "asr_jobs")
    report = one_pass(dsn, overrides)
    error = report.tables["jobs"].error
    assert error is not None
    assert report.exit_code == 1
    assert report.tables["asr_jobs"].ok
    assert report.tables["asr_jobs"].requeued_ids == [str(other)]
    events = the_events(conn)
    assert [event["table"] for event in events] == ["asr_jobs"]
    return error.code, error.message


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.every_postgres
def test_an_unknown_table_is_named(dsn: str, conn: Connection) -> None:
    conn.execute("alter table jobs rename to tasks")
    code, message = refused_table(dsn, conn)
    assert code == "missing_table"
    assert "no table jobs" in message
    assert "job-reaper migrate" in message


def test_missing_columns_are_all_named_at_once(dsn: str, conn: Connection) -> None:
    job = a_job(conn)
    conn.execute("alter table jobs drop stage, drop attempts_refunded")
    code, message = refused_table(dsn, conn)
    assert code == "missing_column"
    assert "jobs has no column attempts_refunded, stage" in message
    assert "job-reaper migrate" in message
    assert "tables.jobs.columns" in message
    assert the_job(conn, job)["status"] == "processing"


@pytest.mark.parametrize(
    "column", ["lease_expires_at", "last_heartbeat_at", "processing_started_at", "next_earliest_run_at"]
)
def test_a_timestamp_without_time_zone_is_refused(dsn: str, conn: Connection, column: str) -> None:
    job = a_job(conn)
    conn.execute(f"alter table jobs alter {column} type timestamp".encode())
    code, message = refused_table(dsn, conn)
    assert code == "wrong_type"
    assert f"{column} is timestamp without time zone" in message
    assert f"ALTER TABLE jobs ALTER {column} TYPE timestamptz" in message
    assert the_job(conn, job)["status"] == "processing"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("alter attempt_count drop default, alter attempt_count type text", "attempt_count is text"),
        ("alter expected_duration_ms type numeric", "expected_duration_ms is numeric"),
        ("alter locked_by type int using null", "locked_by is integer"),
        ("alter fail_code type jsonb using null", "fail_code is jsonb"),
    ],
)
def test_a_column_of_a_type_the_pass_cannot_use_is_refused(
    dsn: str, conn: Connection, change: str, said: str
) -> None:
    conn.execute(f"alter table jobs {change}".encode())
    code, message = refused_table(dsn, conn)
    assert code == "wrong_type"
    assert said in message


def test_a_view_is_no_table(dsn: str, conn: Connection) -> None:
    conn.execute("alter table jobs rename to real_jobs")
    conn.execute("create view jobs as select * from real_jobs")
    code, message = refused_table(dsn, conn)
    assert code == "not_a_table"
    assert "jobs" in message
    assert "name the table below it" in message


def test_a_status_the_apps_enum_does_not_know_is_refused_before_any_row(dsn: str, conn: Connection) -> None:
    job = a_job(conn, attempt=3)
    conn.execute(
        "do $$ declare i text; begin for i in select indexrelid::regclass from pg_index where indrelid ="
        " 'jobs'::regclass and indpred is not null loop execute 'drop index ' || i; end loop; end $$"
    )
    conn.execute("create type words as enum ('queued', 'processing', 'done')")
    conn.execute("alter table jobs alter status drop default, alter status type words using status::words")
    code, message = refused_table(dsn, conn)
    assert code == "wrong_type"
    assert "failed" in message
    assert "tables.jobs.statuses" in message
    assert the_job(conn, job)["status"] == "processing"


# ── events ──────────────────────────────────────────────────────────────────────────────────────────


def events_of_their_own(conn: Connection, columns: str) -> dict[str, object]:
    conn.execute(f"create table own_events ({columns})".encode())
    return {"tables.jobs.events.table": "own_events"}


@pytest.mark.parametrize(
    ("columns", "code", "said"),
    [
        (
            "job_id bigint, data jsonb",
            "wrong_type",
            "public.jobs.id is uuid, which cannot be cast to public.own_events.job_id (bigint)",
        ),
        ("job uuid, data jsonb", "missing_column", "own_events has no column job_id"),
        ("job_id text, data bytea", "wrong_type", "own_events.data is bytea"),
        ("job_id text, data jsonb, tenant int not null", "events_unwritable", "own_events demands tenant"),
    ],
)
def test_an_event_table_that_cannot_take_the_events_is_refused(
    dsn: str, conn: Connection, columns: str, code: str, said: str
) -> None:
    job = a_job(conn)
    overrides = events_of_their_own(conn, columns)
    assert refused_table(dsn, conn, **overrides)[0] == code
    message = refused_table_message(dsn, overrides)
    assert said in message
    assert the_job(conn, job)["status"] == "processing"


def refused_table_message(dsn: str, overrides: dict[str, object]) -> str:
    error = one_pass(dsn, overrides).tables["jobs"].error
    assert error is not None
    return error.message


def test_no_event_table_at_all_means_no_job_is_touched(dsn: str, conn: Connection) -> None:
    job = a_job(conn)
    conn.execute("drop table job_events")
    report = one_pass(dsn)
    for table in report.tables.values():
        assert table.error is not None
        assert table.error.code == "missing_table"
        assert "job_events" in table.error.message
    assert the_job(conn, job)["status"] == "processing"


# ── rights ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("grants", "said"),
    [
        ("", ["SELECT on public.jobs", "UPDATE (", "INSERT on"]),
        ("grant select on jobs to poor", ["UPDATE (", "status"]),
        ("grant select, update on jobs to poor", ["INSERT on", "job_events"]),
        ("grant select, update (status) on jobs to poor; grant insert on job_events to poor", ["locked_by"]),
    ],
)
def test_a_role_without_rights_is_told_which_ones_it_lacks(
    dsn: str, conn: Connection, grants: str, said: list[str]
) -> None:
    job = a_job(conn)
    conn.execute("do $$ begin create role poor login; exception when duplicate_object then null; end $$")
    conn.execute("grant select, update on asr_jobs to poor")
    if grants:
        conn.execute(grants.encode())
    report = one_pass(dsn.replace("postgres@", "poor@"))
    error = report.tables["jobs"].error
    assert error is not None
    assert error.code == "no_rights"
    assert "'poor'" in error.message
    assert "migrations/grants.sql" in error.message
    for words in said:
        assert words in error.message
    assert the_job(conn, job)["status"] == "processing"
    assert report.exit_code == 1


# ── the database ────────────────────────────────────────────────────────────────────────────────────


def failed_as_a_whole(done: Ended, code: str) -> str:
    assert done.code == 1
    assert not done.json["ok"]
    tables: dict[str, Any] = done.json["tables"]
    assert {table["error"]["code"] for table in tables.values()} == {code}
    message: str = tables["jobs"]["error"]["message"]
    assert "DATABASE_URL" in message
    return message


def test_a_read_only_database_is_refused_and_left_alone(dsn: str, conn: Connection) -> None:
    job = a_job(conn)
    url = dsn + "&options=-c%20default_transaction_read_only%3Don"
    assert "primary" in failed_as_a_whole(once(url), "read_only")
    assert the_job(conn, job)["status"] == "processing"
    assert once(url, "--dry-run").json["tables"]["jobs"]["requeued"] == [str(job)], "looking is allowed"


def test_an_unreachable_database_is_exit_1(tmp_path: Path) -> None:
    message = failed_as_a_whole(once(f"postgresql:///app?host={tmp_path}"), "unreachable")
    assert "is the database up" in message


def test_a_database_that_does_not_exist_is_refused_at_once(dsn: str) -> None:
    done = once(dsn.replace("@/", "@/no_such_"))
    assert "does not exist" in failed_as_a_whole(done, "refused")


def test_a_role_that_may_not_connect_is_refused_at_once(
    dsn: str, conn: Connection, pg_server: Server
) -> None:
    conn.execute("do $$ begin create role walled nologin; exception when duplicate_object then null; end $$")
    message = failed_as_a_whole(once(dsn.replace("postgres@", "walled@")), "refused")
    assert "not permitted to log in" in message
    assert pg_server.major


# ── configuration ───────────────────────────────────────────────────────────────────────────────────


def test_a_connection_string_that_cannot_be_read_is_exit_2_and_never_shown() -> None:
    for url in ("postgresql://app:s3cret@host:notaport/app", "host=db password=s3cret nonsense"):
        done = once(url)
        assert done.code == 2
        assert "DATABASE_URL" in done.stderr
        assert "s3cret" not in done.stderr + done.stdout
        assert "Traceback" not in done.stderr


def test_negative_and_absurd_values_are_all_told_at_once_and_nothing_is_changed(
    dsn: str, conn: Connection
) -> None:
    job = a_job(conn)
    wrong = {
        "REAPER_INTERVAL_SEC": "-1",
        "REAPER_BATCH_SIZE": "0",
        "DEFAULT_LEASE_SEC": "1e99",
        "CLIP_SLA_FACTOR": "nan",
        "JOB_MAX_ATTEMPTS": "-3",
        "REAPER_METRICS_PORT": "99999",
        "REAPER_TABLES": "jobs,,jobs",
        "REAPER_DRY_RUN": "perhaps",
    }
    done = once(dsn, **wrong)
    assert done.code == 2
    assert done.stdout == ""
    for key in wrong:
        assert key in done.stderr
    assert the_job(conn, job)["status"] == "processing"


def test_a_missing_configuration_file_and_an_unknown_flag_are_exit_2(dsn: str, tmp_path: Path) -> None:
    done = once(dsn, REAPER_CONFIG=str(tmp_path / "none.yaml"))
    assert done.code == 2
    assert "REAPER_CONFIG" in done.stderr
    assert ended(started(dsn, "once", "--dry-rum")).code == 2
    assert ended(started(dsn, "onse")).code == 2


def test_liveness_that_cannot_be_had_is_exit_2_before_anything_is_changed(dsn: str, conn: Connection) -> None:
    job = a_job(conn)
    done = once(dsn, REAPER_LIVENESS="kubernetes")
    assert done.code == 2
    assert "REAPER_LIVENESS" in done.stderr
    assert the_job(conn, job)["status"] == "processing"
