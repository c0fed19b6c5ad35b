"""One row that cannot be written must cost that row and nothing else: the batch is halved until the row
stands alone, its id and error are reported, all others are committed."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.report import TableReport
from tests.factories import a_job, the_events, the_job
from tests.postgres import Connection
from tests.reaping import by_status, count_of, many_expired, once, one_event_per_change, one_pass

SPITE = """
create table spite (id text primary key, message text not null, code text not null default 'P0001');
create function spite() returns trigger language plpgsql as $$
declare poison spite%rowtype;
begin
    select * into poison from spite where id = new.id::text;
    if found then raise exception '%', poison.message using errcode = poison.code; end if;
    return new;
end $$;
create trigger spite before update on jobs for each row execute function spite();
"""


def poison(conn: Connection, *jobs: Any, message: str = "not this one", code: str = "P0001") -> None:
    """From now on the update of these rows raises."""
    if count_of(conn, "select to_regclass('spite') is null"):
        conn.execute(SPITE.encode())
    for job in jobs:
        conn.execute("insert into spite values (%s, %s, %s)", (str(job), message, code))


def nth_row(conn: Connection, n: int) -> Any:
    """The row that stands at this place (from 0) in the order of the pass."""
    return count_of(conn, "select id from jobs order by lease_expires_at, id offset %s limit 1", (n,))


def jobs_pass(dsn: str, **overrides: object) -> TableReport:
    keys = {"size": "batch.size", "lock_ms": "database.lockTimeoutMs", "ms": "database.statementTimeoutMs"}
    return one_pass(dsn, {keys[key]: value for key, value in overrides.items()}).tables["jobs"]


@pytest.mark.every_postgres
def test_one_poisonous_row_in_5000_costs_itself_only(dsn: str, conn: Connection) -> None:
    many_expired(conn, 5000)
    job = nth_row(conn, 3210)
    other = a_job(conn, "asr_jobs")
    poison(conn, job, message="the app does not want this")
    ended = once(dsn)
    table = ended.json["tables"]["jobs"]
    assert ended.code == 1
    assert not ended.json["ok"]
    assert not table["ok"]
    assert table["poisoned"] == [str(job)]
    assert table["counts"]["requeued"] == 4999
    assert table["counts"]["poisoned"] == 1
    assert table["error"]["code"] == "poisoned"
    assert str(job) in table["error"]["message"]
    assert "the app does not want this" in table["error"]["message"]
    assert by_status(conn) == {"queued": 4999, "processing": 1}
    assert the_events(conn, job) == []
    assert count_of(conn, "select count(*) from job_events where data ->> 'table' = 'jobs'") == 4999
    assert ended.json["tables"]["asr_jobs"]["requeued"] == [str(other)]
    (line,) = ended.said("job cannot be written, stepped over")
    assert (line["level"], line["id"], line["table"]) == ("error", str(job), "jobs")
    assert "the app does not want this" in line["error"]


@pytest.mark.parametrize(
    "places", [(0,), (9,), (4,), (5,), (0, 1), (4, 5), (0, 9), (3, 6, 7), (0, 2, 4, 6, 8)]
)
def test_wherever_the_poison_stands_all_others_are_served(
    dsn: str, conn: Connection, places: tuple[int, ...]
) -> None:
    # Ten rows in pages of five: the head, the end and both sides of a page's end.
    many_expired(conn, 10)
    jobs = [nth_row(conn, place) for place in places]
    poison(conn, *jobs)
    report = jobs_pass(dsn, size=5)
    assert [row.id for row in report.poisoned] == [str(job) for job in jobs]
    assert report.counts["requeued"] == 10 - len(jobs)
    assert report.counts["moved_on"] == 0
    assert not report.ok
    assert one_event_per_change(conn)


def test_a_table_in_which_every_row_is_poisonous_still_ends(dsn: str, conn: Connection) -> None:
    many_expired(conn, 40)
    poison(conn, *(row[0] for row in conn.execute("select id from jobs").fetchall()))
    report = jobs_pass(dsn, size=16)
    assert len(report.poisoned) == report.counts["poisoned"] == 40
    assert by_status(conn) == {"processing": 40}
    assert the_events(conn) == []


@pytest.mark.parametrize(
    "code",
    ["P0001", "23514", "22012", "42883", "42P01", "42501", "AB123", "XX001", "0A000", "55000", "25006"],
)
def test_whatever_code_the_trigger_raises_it_is_that_rows_fault(
    dsn: str, conn: Connection, code: str
) -> None:
    many_expired(conn, 6)
    job = nth_row(conn, 2)
    poison(conn, job, code=code, message="not here")
    report = jobs_pass(dsn)
    assert [row.id for row in report.poisoned] == [str(job)]
    assert "not here" in report.poisoned[0].error
    assert report.counts["requeued"] == 5


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_row_whose_conflict_never_ends_is_stepped_over(dsn: str, conn: Connection, code: str) -> None:
    many_expired(conn, 3)
    job = nth_row(conn, 1)
    poison(conn, job, code=code, message="again")
    report = jobs_pass(dsn)
    assert [row.id for row in report.poisoned] == [str(job)]
    assert report.counts["requeued"] == 2


def test_a_row_whose_trigger_is_slower_than_the_statement_may_be_is_stepped_over(
    dsn: str, conn: Connection
) -> None:
    many_expired(conn, 8)
    job = nth_row(conn, 5)
    conn.execute(
        f"create function slow() returns trigger language plpgsql as $$ begin"
        f" if new.id = '{job}' then perform pg_sleep(60); end if; return new; end $$".encode()
    )
    conn.execute("create trigger slow before update on jobs for each row execute function slow()")
    report = jobs_pass(dsn, ms=300)
    assert [row.id for row in report.poisoned] == [str(job)]
    assert "statement timeout" in report.poisoned[0].error
    assert report.counts["requeued"] == 7


def test_a_row_whose_trigger_waits_for_a_lock_is_stepped_over(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    many_expired(conn, 64)
    job = nth_row(conn, 33)
    conn.execute(
        f"create function wait() returns trigger language plpgsql as $$ begin"
        f" if new.id = '{job}' then perform pg_advisory_xact_lock(7); end if; return new; end $$".encode()
    )
    conn.execute("create trigger wait before update on jobs for each row execute function wait()")
    with other_conn.transaction():
        other_conn.execute("select pg_advisory_xact_lock(7)")
        report = jobs_pass(dsn, lock_ms=50)
    assert [row.id for row in report.poisoned] == [str(job)]
    assert report.counts["requeued"] == 63
    assert jobs_pass(dsn).requeued_ids == [str(job)], "free again: the next pass takes it"


@pytest.mark.parametrize("locked", ["jobs in access exclusive mode", "job_events in share mode"])
def test_a_locked_table_is_one_error_and_not_many_odd_rows(
    dsn: str, conn: Connection, other_conn: Connection, locked: str
) -> None:
    many_expired(conn, 20)
    with other_conn.transaction():
        other_conn.execute(f"lock table {locked}".encode())
        report = one_pass(dsn, {"database.lockTimeoutMs": 20})
    error = report.tables["jobs"].error
    assert error is not None
    assert error.code == "lock_timeout"
    assert len(report.tables["jobs"].poisoned) < 3
    assert report.tables["asr_jobs"].ok
    assert report.exit_code == 1
    assert one_pass(dsn).tables["jobs"].counts["requeued"] == 20


def test_an_event_that_cannot_be_inserted_keeps_its_job_unchanged(dsn: str, conn: Connection) -> None:
    many_expired(conn, 10)
    job = nth_row(conn, 4)
    conn.execute(f"alter table job_events add constraint no_such check (job_id <> '{job}')".encode())
    report = jobs_pass(dsn)
    assert [row.id for row in report.poisoned] == [str(job)]
    assert "no_such" in report.poisoned[0].error
    assert report.counts["requeued"] == 9
    assert one_event_per_change(conn)


def test_a_poisonous_row_among_those_without_a_lease_is_stepped_over(dsn: str, conn: Connection) -> None:
    jobs = [a_job(conn, lease_age=None, attempt=0) for _ in range(6)]
    far = a_job(conn, lease_age=-(10**8))
    poison(conn, jobs[3])
    report = jobs_pass(dsn, size=3)
    assert [row.id for row in report.poisoned] == [str(jobs[3])]
    assert report.counts["requeued"] == 6
    assert the_job(conn, far)["status"] == "queued"


def test_odd_payloads_do_not_trouble_the_pass(dsn: str, conn: Connection) -> None:
    conn.execute("alter table jobs add payload jsonb, add raw text, add body json")
    payloads = ["null", "[]", '"\\ud83d\\ude00"', '{"":{"a":[1e308,-0.0,"\\""]}}', "[" * 500 + "]" * 500]
    for payload in payloads:
        a_job(conn, payload=payload, raw="\x01\x7f'\"\\%s{}\n" + payload[:50], body='{"a":"\\u0000"}')
    assert jobs_pass(dsn).counts["requeued"] == len(payloads)


def test_a_trigger_that_swallows_the_update_gets_no_event(dsn: str, conn: Connection) -> None:
    job = a_job(conn)
    conn.execute("create function no() returns trigger language plpgsql as $$ begin return null; end $$")
    conn.execute("create trigger no before update on jobs for each row execute function no()")
    report = jobs_pass(dsn)
    assert report.counts["moved_on"] == 1
    assert report.requeued_ids == []
    assert the_job(conn, job)["status"] == "processing"
    assert the_events(conn) == []


def test_a_poisonous_row_is_tried_again_by_the_next_pass(dsn: str, conn: Connection) -> None:
    job = a_job(conn)
    poison(conn, job)
    assert not jobs_pass(dsn).ok
    conn.execute("delete from spite")
    assert jobs_pass(dsn).requeued_ids == [str(job)]
