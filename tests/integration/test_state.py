"""`reaper_state`: counts that outlive the process, turns between reapers, and no harm when it is broken."""

from __future__ import annotations

import logging

import pytest

from reconciler.reaper import Reaper
from reconciler.report import PassReport
from tests.factories import a_job, the_events, the_job
from tests.postgres import Connection
from tests.reaping import a_reaper, by_status, count_of, many_expired, once, one_pass

SCOPE = "pass:asr_jobs,jobs"


def held_by(conn: Connection, holder: str, sec: float) -> None:
    conn.execute(
        "insert into reaper_state (scope, holder, until) values (%s, %s, now() + make_interval(secs => %s))"
        " on conflict (scope) do update set holder = excluded.holder, until = excluded.until",
        (SCOPE, holder, sec),
    )


def kept_totals(reaper: Reaper) -> dict[tuple[str, str, str, str], int]:
    totals = reaper.totals()
    assert totals is not None
    return dict(totals.counts)


# ── counters ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.every_postgres
def test_the_counters_in_postgres_equal_the_events(dsn: str, conn: Connection) -> None:
    stages = ("clip", None, "clip|asr", "unheard of")
    for table in ("jobs", "asr_jobs"):
        for stage in stages:
            many = [a_job(conn, table, stage=stage, attempt=attempt) for attempt in (1, 2, 3)]
            many.append(a_job(conn, table, stage=stage, lease_age=None, attempt=0))
    for size in (3, 5000):  # several passes, several batches, several processes
        one_pass(dsn, {"batch.size": size, "tables.jobs.maxPerPass": 5})
    once(dsn)
    counted = conn.execute(
        "select data ->> 'table', case when data ->> 'type' like '%failed%' then 'failed'"
        " else 'requeued' end, data #>> '{details,reason}', count(*) from job_events group by 1, 2, 3"
    ).fetchall()
    expected = {(table, outcome, reason): n for table, outcome, reason, n in counted}
    assert sum(expected.values()) == 32
    with a_reaper(dsn) as reaper:
        reaper.run_once()
        kept: dict[tuple[str, str, str], int] = {}
        for (table, outcome, _, reason), n in kept_totals(reaper).items():
            kept[table, outcome, reason] = kept.get((table, outcome, reason), 0) + n
    assert kept == expected


def test_stages_nobody_configured_are_counted_as_one(dsn: str, conn: Connection) -> None:
    # A stage per job would otherwise grow this row, and every batch rewrites it.
    for n in range(50):
        a_job(conn, stage=f"stage {n}")
    a_job(conn, stage="asr")
    one_pass(dsn)
    counters = count_of(conn, "select counters from reaper_state where scope = 'counters:jobs'")
    assert counters == {"requeued|other|lease_expired": 50, "requeued|asr|lease_expired": 1}


def test_a_batch_that_is_rolled_back_is_not_counted(dsn: str, conn: Connection) -> None:
    many_expired(conn, 4)
    conn.execute("create function no() returns trigger language plpgsql as $$ begin raise 'no'; end $$")
    conn.execute("create trigger no before update on jobs for each row execute function no()")
    one_pass(dsn)
    assert count_of(conn, "select count(*) from reaper_state where scope like 'counters:%%'") == 0


def test_metrics_count_on_where_an_earlier_process_stopped(dsn: str, conn: Connection) -> None:
    for _ in range(2):
        a_job(conn, stage="clip")
        with a_reaper(dsn, with_metrics=True) as reaper:
            reaper.run_once()
    assert reaper.metrics is not None
    labels = {"table": "jobs", "stage": "clip", "reason": "lease_expired"}
    assert reaper.metrics.registry.get_sample_value("reaper_requeues_total", labels) == 2


# ── broken ──────────────────────────────────────────────────────────────────────────────────────────


BROKEN = {
    "missing": "drop table reaper_state",
    "read only": "revoke insert, update on reaper_state from clerk",
    "not readable": "revoke select on reaper_state from clerk",
    "of another shape": "alter table reaper_state drop until",
    "a view": "alter table reaper_state rename to s; create view reaper_state as select scope from s;"
    " grant all on reaper_state to clerk",
    "guarded by a trigger": "create function no() returns trigger language plpgsql as $$ begin"
    " raise 'no'; end $$; create trigger no before insert or update on reaper_state"
    " for each row execute function no()",
}


@pytest.mark.parametrize("how", BROKEN)
def test_jobs_are_reaped_with_their_events_when_the_state_is(
    dsn: str, conn: Connection, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    conn.execute("do $$ begin create role clerk login; exception when duplicate_object then null; end $$")
    conn.execute("grant select, insert, update on all tables in schema public to clerk")
    jobs = [a_job(conn), a_job(conn, attempt=3)]
    conn.execute(BROKEN[how].encode())
    report = one_pass(dsn.replace("postgres@", "clerk@"))
    assert report.ok, [table.error for table in report.tables.values()]
    assert by_status(conn) == {"queued": 1, "failed": 1}
    assert all(len(the_events(conn, job)) == 1 for job in jobs)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("reaper_state" in text for text in warnings)


def test_counters_that_cannot_be_written_cost_the_count_and_not_the_turn(dsn: str, conn: Connection) -> None:
    conn.execute("alter table reaper_state add constraint no check (scope not like 'counters:%')")
    many_expired(conn, 3)
    assert one_pass(dsn).tables["jobs"].counts["requeued"] == 3
    many_expired(conn, 3)
    report = one_pass(dsn, holder="somebody else")
    assert report.skipped is None, "the first pass gave its turn back"
    assert report.tables["jobs"].counts["requeued"] == 3


def test_a_locked_state_row_does_not_keep_jobs_from_being_reaped(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    job = a_job(conn)
    with other_conn.transaction():
        other_conn.execute("lock table reaper_state in access exclusive mode")
        report = one_pass(dsn, {"database.lockTimeoutMs": 20})
    assert report.ok
    assert the_job(conn, job)["status"] == "queued"
    assert len(the_events(conn, job)) == 1


# ── turns ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_turn_is_taken_given_back_and_remembered(dsn: str, conn: Connection) -> None:
    one_pass(dsn, holder="me")
    row = conn.execute(
        "select holder, until <= now(), last_success_at > now() - interval '1 min'"
        " from reaper_state where scope = %s",
        (SCOPE,),
    ).fetchone()
    assert row == ("me", True, True)


def test_a_failed_pass_gives_its_turn_back_but_is_no_success(dsn: str, conn: Connection) -> None:
    conn.execute("alter table jobs drop stage")
    one_pass(dsn, holder="me")
    row = conn.execute("select until <= now(), last_success_at from reaper_state").fetchone()
    assert row == (True, None)


def test_a_dead_reapers_turn_is_taken_over_once_it_has_run_out(dsn: str, conn: Connection) -> None:
    a_job(conn)
    held_by(conn, "dead", 3600)
    assert "dead" in str(one_pass(dsn).skipped)
    held_by(conn, "dead", -0.001)
    report = one_pass(dsn)
    assert report.skipped is None
    assert report.tables["jobs"].counts["requeued"] == 1


def test_reapers_of_different_tables_do_not_wait_for_each_other(dsn: str, conn: Connection) -> None:
    held_by(conn, "other", 3600)
    a_job(conn)
    assert one_pass(dsn, REAPER_TABLES="jobs").tables["jobs"].counts["requeued"] == 1


def test_a_long_pass_renews_its_turn_and_ends_when_it_was_taken_over(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_expired(conn, 20)
    monkeypatch.setattr("reconciler.reaper.TTL_SEC", 0.0)  # due for a renewal before every batch
    seen: list[PassReport] = []
    with a_reaper(dsn, {"batch.size": 4}, holder="me") as reaper:
        conn.execute(
            "create function rob() returns trigger language plpgsql as $$ begin"
            " if (select count(*) from job_events) >= 8 then update reaper_state set holder = 'robber'"
            " where scope like 'pass:%'; end if; return null; end $$"
        )
        conn.execute("create trigger rob after insert on job_events execute function rob()")
        seen.append(reaper.run_once())
    assert seen[0].tables["jobs"].counts["requeued"] == 8, "the batch after the robbery was not begun"
    assert count_of(conn, "select holder from reaper_state where scope like 'pass:%%'") == "robber"
    assert by_status(conn) == {"queued": 8, "processing": 12}
