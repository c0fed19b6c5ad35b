"""The brakes on a real table: too many expired at once, a silent fleet, a limit per pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.factories import a_job, the_events, the_job
from tests.postgres import Connection
from tests.reaping import a_reaper, by_status, count_of, many_expired, once, one_event_per_change, one_pass

SHARE = {"brake.maxExpiredShare": 0.5}
GRACE = {"brake.outageGraceSec": 120}


def a_fleet(conn: Connection, size: int, *, lease_age: float = 60, beat_age: float = 360) -> list[str]:
    return [
        str(a_job(conn, locked_by=f"worker-{n}", lease_age=lease_age, beat_age=beat_age)) for n in range(size)
    ]


def last_success(conn: Connection, ago_sec: float) -> None:
    conn.execute(
        "update reaper_state set last_success_at = now() - make_interval(secs => %s), resumed_at = null"
        " where scope like 'pass:%%'",
        (ago_sec,),
    )


# ── share ───────────────────────────────────────────────────────────────────────────────────────────


def test_above_the_share_a_table_is_left_unchanged_with_exit_3_and_its_ids_listed(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    expired = {str(a_job(conn)), str(a_job(conn, attempt=3)), str(a_job(conn, lease_age=None))}
    a_job(conn, lease_age=-60)
    other = a_job(conn, "asr_jobs")
    a_job(conn, "asr_jobs", lease_age=-60)
    config = tmp_path / "config.yaml"
    config.write_text("brake: {maxExpiredShare: 0.5}\n")
    done = once(dsn, REAPER_CONFIG=str(config))
    assert done.code == 3
    jobs, asr_jobs = (done.json["tables"][name] for name in ("jobs", "asr_jobs"))
    assert jobs["ok"]
    assert set(jobs["deferred"]) == expired
    assert (jobs["counts"]["deferred"], jobs["requeued"], jobs["failed"]) == (3, [], [])
    assert asr_jobs["requeued"] == [str(other)], "half is not above half"
    (line,) = done.said("brake: table left unchanged")
    assert line["level"] == "warning"
    assert "3 of 4" in line["why"]
    assert "brake.maxExpiredShare=0.5" in line["why"]
    assert by_status(conn) == {"processing": 4}
    assert [event["table"] for event in the_events(conn)] == ["asr_jobs"]


def test_at_the_share_the_pass_acts_and_without_it_nothing_brakes(dsn: str, conn: Connection) -> None:
    a_job(conn)
    a_job(conn, lease_age=-60)
    assert one_pass(dsn, SHARE).exit_code == 0
    assert by_status(conn) == {"queued": 1, "processing": 1}
    a_job(conn)
    conn.execute("delete from jobs where lease_expires_at > now()")
    assert one_pass(dsn, SHARE).exit_code == 3
    assert one_pass(dsn).exit_code == 0
    assert by_status(conn) == {"queued": 2}


def test_a_braked_dry_run_says_the_same(dsn: str, conn: Connection) -> None:
    job = a_job(conn)
    report = one_pass(dsn, SHARE, dry_run=True)
    assert report.exit_code == 3
    assert report.tables["jobs"].deferred_ids == [str(job)]


def test_ids_spared_by_the_brake_are_listed_up_to_a_thousand(dsn: str, conn: Connection) -> None:
    many_expired(conn, 1100)
    table = one_pass(dsn, SHARE).tables["jobs"]
    assert len(set(table.deferred_ids)) == 1000
    assert table.counts["deferred"] == 1100


# ── silent fleet ────────────────────────────────────────────────────────────────────────────────────


def test_a_silent_fleet_is_given_its_grace_after_the_expiry(dsn: str, conn: Connection) -> None:
    young = a_fleet(conn, 5, lease_age=60)
    old = a_job(conn, lease_age=130, start_age=700)
    report = one_pass(dsn, GRACE)
    assert set(report.tables["jobs"].deferred_ids) == set(young)
    assert report.tables["jobs"].requeued_ids == [str(old)]
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("size", "fresh"), [(4, False), (5, True)], ids=["too few to be a fleet", "one of them beats"]
)
def test_what_is_no_silent_fleet_is_reaped_at_once(
    dsn: str, conn: Connection, size: int, fresh: bool
) -> None:
    a_fleet(conn, size)
    if fresh:
        a_job(conn, "asr_jobs", locked_by="worker-x", lease_age=-200, beat_age=10, start_age=20)
    assert one_pass(dsn, GRACE).tables["jobs"].counts["requeued"] == size


def test_holders_of_both_tables_are_one_fleet(dsn: str, conn: Connection) -> None:
    a_fleet(conn, 3)
    for n in range(3):
        a_job(conn, "asr_jobs", locked_by=f"other-{n}")
    report = one_pass(dsn, GRACE)
    assert [table.counts["deferred"] for table in report.tables.values()] == [3, 3]


def test_after_a_gap_of_ours_the_grace_starts_when_we_came_back(dsn: str, conn: Connection) -> None:
    one_pass(dsn, GRACE)
    a_fleet(conn, 5, lease_age=1000, beat_age=1300)
    conn.execute("update jobs set processing_started_at = now() - interval '1 h'")
    last_success(conn, 3600)
    for _ in range(2):  # also the second pass after the gap: our own success must not end the grace
        report = one_pass(dsn, GRACE)
        assert report.tables["jobs"].counts["deferred"] == 5
    conn.execute(
        "update reaper_state set resumed_at = resumed_at - interval '121 s' where scope like 'pass:%'"
    )
    assert one_pass(dsn, GRACE).tables["jobs"].counts["requeued"] == 5


def test_a_gap_shorter_than_three_intervals_is_no_gap(dsn: str, conn: Connection) -> None:
    one_pass(dsn, GRACE)
    last_success(conn, 170)
    a_fleet(conn, 5, lease_age=1000, beat_age=1300)
    conn.execute("update jobs set processing_started_at = now() - interval '1 h'")
    assert one_pass(dsn, GRACE).tables["jobs"].counts["requeued"] == 5


def test_without_the_brake_a_silent_fleet_is_reaped(dsn: str, conn: Connection) -> None:
    a_fleet(conn, 8)
    assert one_pass(dsn).tables["jobs"].counts["requeued"] == 8


# ── maxPerPass ──────────────────────────────────────────────────────────────────────────────────────


def test_a_pass_changes_no_more_than_its_limit_and_the_next_goes_on(dsn: str, conn: Connection) -> None:
    many_expired(conn, 10)
    a_job(conn, lease_age=None, attempt=3)
    a_job(conn, "asr_jobs")
    limit = {"tables.jobs.maxPerPass": 4, "batch.size": 3}
    seen = []
    for _ in range(4):
        report = one_pass(dsn, limit)
        table = report.tables["jobs"]
        seen.append((table.counts["requeued"] + table.counts["failed"], table.capped))
        assert report.exit_code == 0
        assert table.counts["moved_on"] == 0
    assert [changed for changed, _ in seen] == [4, 4, 3, 0]
    assert [capped for _, capped in seen] == [True, True, False, False]
    assert one_event_per_change(conn)
    assert count_of(conn, "select status from asr_jobs") == "queued", "the limit is the table's own"


def test_a_dry_run_obeys_the_limit_too(dsn: str, conn: Connection) -> None:
    many_expired(conn, 10)
    with a_reaper(dsn, {"tables.jobs.maxPerPass": 4}) as reaper:
        dry = reaper.run_once(dry_run=True).tables["jobs"].requeued_ids
        real = reaper.run_once().tables["jobs"].requeued_ids
    assert len(dry) == 4
    assert set(dry) == set(real)


def test_a_limit_that_is_met_exactly_leaves_nothing_waiting(dsn: str, conn: Connection) -> None:
    many_expired(conn, 4)
    table = one_pass(dsn, {"tables.jobs.maxPerPass": 4}).tables["jobs"]
    assert table.counts["requeued"] == 4
    assert not table.capped


def test_rows_of_one_page_beyond_the_limit_are_said_to_wait(dsn: str, conn: Connection) -> None:
    many_expired(conn, 10)
    table = one_pass(dsn, {"tables.jobs.maxPerPass": 4}).tables["jobs"]
    assert (table.counts["requeued"], table.counts["moved_on"], table.capped) == (4, 0, True)


def test_the_oldest_are_served_first_when_the_limit_bites(dsn: str, conn: Connection) -> None:
    jobs = [a_job(conn, lease_age=age, start_age=5000) for age in (100, 300, 200, 400)]
    one_pass(dsn, {"tables.jobs.maxPerPass": 2})
    assert [the_job(conn, job)["status"] for job in jobs] == ["processing", "queued", "processing", "queued"]
