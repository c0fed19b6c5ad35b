"""A pass always ends, and what stands in its way stops nothing else: locks, brakes, limits, frost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psycopg
import pytest

from reconciler.database import Database
from reconciler.errors import ConfigError, TransientError
from reconciler.reaper import Reaper
from reconciler.report import PassReport
from tests.factories import a_job, the_events, the_job
from tests.postgres import Connection


def one_pass(dsn: str, config: str = "", tmp_path: Path | None = None) -> PassReport:
    env = {}
    if tmp_path is not None:
        file = tmp_path / "reaper.yaml"
        file.write_text("database: {lockTimeoutMs: 100}\n" + config)
        env = {"REAPER_CONFIG": str(file)}
    with Reaper(dsn, env=env) as reaper:
        return reaper.run_once()


@pytest.mark.parametrize("mode", ["EXCLUSIVE", "SHARE"])
def test_a_locked_table_is_said_to_be_locked_and_no_row_is_blamed(
    dsn: str, conn: Connection, other_conn: Connection, tmp_path: Path, mode: str
) -> None:
    a_job(conn)
    spared = a_job(conn, "asr_jobs")
    with other_conn.transaction():
        other_conn.execute(f"lock table jobs in {mode} mode".encode())
        report = one_pass(dsn, tmp_path=tmp_path)
    locked = report.tables["jobs"]
    assert locked.error is not None
    assert locked.error.code == "lock_timeout"
    assert locked.counts["poisoned"] == 0
    assert report.tables["asr_jobs"].requeued_ids == [str(spared)], "the other table is served"


def test_rows_that_wait_for_the_same_lock_do_not_keep_the_others_back(
    dsn: str, conn: Connection, other_conn: Connection, tmp_path: Path
) -> None:
    conn.execute(
        """
        create table projects (id int primary key, touched int not null default 0);
        insert into projects values (1), (2);
        alter table jobs add column project int;
        create function touch() returns trigger language plpgsql as
        $$ begin update projects set touched = touched + 1 where id = new.project; return new; end $$;
        create trigger touch after update on jobs for each row execute function touch();
        """
    )
    stuck = [a_job(conn, lease_age=1000 - n, project=1) for n in range(5)]
    free = [a_job(conn, lease_age=500 - n, project=2) for n in range(40)]
    with other_conn.transaction():
        other_conn.execute("update projects set touched = 0 where id = 1")
        report = one_pass(dsn, tmp_path=tmp_path).tables["jobs"]
    assert report.error is None
    assert {poison.id for poison in report.poisoned} == {str(job) for job in stuck}
    assert report.counts["requeued"] == len(free)
    assert one_pass(dsn).tables["jobs"].counts["requeued"] == len(stuck)


def test_where_the_status_is_part_of_a_key_an_open_reference_hides_the_row_instead_of_blaming_it(
    dsn: str, conn: Connection, other_conn: Connection, tmp_path: Path
) -> None:
    conn.execute("create unique index on jobs (id, status)")
    conn.execute("create table progress (job_id uuid references jobs (id))")
    held, free = a_job(conn), a_job(conn)
    with other_conn.transaction():
        other_conn.execute("insert into progress values (%s)", (held,))
        report = one_pass(dsn, tmp_path=tmp_path).tables["jobs"]
    assert (report.error, report.counts["poisoned"], report.counts["moved_on"]) == (None, 0, 1)
    assert report.requeued_ids == [str(free)]


def test_the_silent_fleet_brake_lets_go_even_when_every_pass_comes_after_a_gap(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    """A CronJob every five minutes with the default interval of one: each pass looks late."""
    for n in range(6):
        a_job(conn, locked_by=f"w{n}", beat_age=4000, lease_age=3000)
    config = "brake: {outageGraceSec: 120}\n"
    conn.execute(
        "insert into reaper_state (scope, last_success_at)"
        " values ('pass:asr_jobs,jobs', now() - interval '1 hour')"
    )
    first = one_pass(dsn, config, tmp_path)
    assert first.tables["jobs"].counts["deferred"] == 6
    assert first.tables["jobs"].braked is not None
    assert first.exit_code == 3
    conn.execute(
        "update reaper_state set resumed_at = resumed_at - interval '5 min' where scope like 'pass:%'"
    )
    second = one_pass(dsn, config, tmp_path)
    assert second.tables["jobs"].counts["requeued"] == 6


def test_the_share_brake_counts_only_what_has_truly_expired(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    for _ in range(8):  # started, never beaten: stale only after an hour
        a_job(conn, lease_age=None, beat_age=None, start_age=1000)
    lost = a_job(conn)
    report = one_pass(dsn, "brake: {maxExpiredShare: 0.5}\n", tmp_path).tables["jobs"]
    assert report.braked is None
    assert report.requeued_ids == [str(lost)]


def test_a_role_with_one_connection_serves_two_large_tables_one_after_the_other(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    for table in ("jobs", "asr_jobs"):
        for _ in range(6):
            a_job(conn, table)
    role = f"narrow_{os.getpid()}"
    conn.execute(f"create role {role} login superuser connection limit 1".encode())
    conn.execute(f"alter role {role} nosuperuser".encode())
    conn.execute(f"grant select, insert, update on all tables in schema public to {role}".encode())
    conn.execute(f"grant usage on all sequences in schema public to {role}".encode())
    try:
        report = one_pass(dsn.replace("postgres@", f"{role}@"), "batch: {size: 5}\n", tmp_path)
    finally:
        conn.execute(f"drop owned by {role}; drop role {role}".encode())
    assert report.ok, {name: table.error for name, table in report.tables.items()}
    assert [table.counts["requeued"] for table in report.tables.values()] == [6, 6]


def test_a_pass_that_was_stopped_before_it_was_done_says_so_and_counts_as_no_success(
    dsn: str, conn: Connection
) -> None:
    job = a_job(conn)
    reaper = Reaper(dsn, env={})
    reaper._stopping.set()
    report = reaper.run_once()
    assert report.skipped is not None
    assert "ended early" in report.skipped
    row = conn.execute("select last_success_at from reaper_state where scope like 'pass:%'").fetchone()
    assert row == (None,)
    reaper.stop()
    assert reaper.run_once().tables["jobs"].requeued_ids == [str(job)], "a later pass is a new wish"
    reaper.close()


def test_a_frozen_server_is_hung_up_on(dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own time-outs need a server that runs: SIGSTOP its backend and wait for ours."""
    monkeypatch.setattr("reconciler.database.HANG_MARGIN_SEC", 0.2)
    monkeypatch.setattr("reconciler.database.TRIES", 1)
    database = Database(dsn, statement_timeout_ms=100)
    pid: int = database.run(lambda c: c.info.backend_pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TransientError):
            database.run(lambda c: c.execute("select 1").fetchone())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert database.run(lambda c: c.execute("select 1").fetchone()) == (1,)
    database.close()
    assert conn.execute("select 1").fetchone() == (1,)


def test_the_tail_of_a_password_never_reaches_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        Database("postgresql://reaper:p@ssw0rd@db.invalid:5432/app")
    assert "ssw0rd" not in str(caught.value)
    assert "percent-encoded" in str(caught.value)


def test_ids_of_a_domain_that_refuses_null_are_served(dsn: str, conn: Connection) -> None:
    conn.execute("create domain job_id as bigint not null")
    conn.execute("alter table jobs alter id drop default, alter id type job_id using 1")
    job = a_job(conn, id=7)
    assert one_pass(dsn).tables["jobs"].requeued_ids == [7]
    assert the_events(conn, job)[0]["type"] == "reaper:requeued"


@pytest.mark.parametrize("name", ["edge", "page", "judged", "touched", "measured"])
def test_a_table_may_bear_the_name_of_one_of_our_own_steps(dsn: str, conn: Connection, name: str) -> None:
    conn.execute(f"alter table jobs rename to {name}".encode())
    job = a_job(conn, name)
    with Reaper(dsn, env={"REAPER_TABLES": name}) as reaper:
        assert reaper.run_once().tables[name].requeued_ids == [str(job)]
    assert the_job(conn, job, name)["status"] == "queued"


def test_evidence_that_is_always_too_old_ends_the_table_instead_of_looping(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job(conn)
    monkeypatch.setattr("reconciler.statements.EVIDENCE_SEC", -1)
    report = one_pass(dsn).tables["jobs"]
    assert report.error is not None
    assert report.error.code == "evidence_too_old"
    assert the_job(conn, job)["status"] == "processing"


def test_keepalives_are_set_unless_the_dsn_says_otherwise(dsn: str) -> None:
    database = Database(dsn)
    given: dict[str, str] = database.run(lambda c: c.info.get_parameters())
    database.close()
    assert (given["keepalives_idle"], given["tcp_user_timeout"]) == ("10", "30000")
    own = Database(psycopg.conninfo.make_conninfo(dsn, keepalives_idle=77))
    assert own.run(lambda c: c.info.get_parameters())["keepalives_idle"] == "77"
    own.close()
