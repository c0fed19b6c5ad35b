"""Two real sessions at the same rows: whatever a worker or another reaper does between our looking and our
writing, each job is changed once, by one of them, with one event.

Nothing here sleeps: the steps of a pass are called one by one, or a lock holds one side exactly where the
test wants it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from reconciler.database import Database
from reconciler.model import Policy, Rulebook
from reconciler.report import PageRequest, Scan
from reconciler.shape import read_shape
from reconciler.store import PgStore
from reconciler.worker import claim_next, finish_job, heartbeat_job
from tests.factories import a_job, a_queued_job, the_events, the_job
from tests.postgres import Connection, wait_until
from tests.reaping import (
    by_status,
    count_of,
    many_expired,
    one_pass,
    reapers_waiting,
    settings_for,
)

pytestmark = pytest.mark.every_postgres


@contextmanager
def a_store(dsn: str) -> Iterator[PgStore]:
    """The steps of a pass over `jobs`, to be called one by one."""
    database = Database(dsn, lock_timeout_ms=20_000)
    spec = settings_for(dsn).table_specs()[0]
    yield PgStore(database, database.run(lambda conn: read_shape(conn, spec)), Policy())
    database.close()


@pytest.fixture
def store(dsn: str) -> Iterator[PgStore]:
    with a_store(dsn) as steps:
        yield steps


def reap(store: PgStore, as_of: str, scan: Scan = Scan.EXPIRED, **request: Any) -> Any:
    return store.reap(PageRequest(scan, as_of, limit=request.pop("limit", 100), **request), Rulebook())


def expire_now(conn: Connection) -> None:
    conn.execute(
        "update jobs set lease_expires_at = now() - interval '1 ms',"
        " processing_started_at = now() - interval '1 h'"
    )


# ── a worker moves between judging and writing ──────────────────────────────────────────────────────


def test_a_worker_that_beats_after_the_survey_keeps_its_job(store: PgStore, conn: Connection) -> None:
    job = a_job(conn)
    survey = store.survey()
    assert survey.expired == 1
    conn.execute("update jobs set last_heartbeat_at = now(), lease_expires_at = now() + interval '5 min'")
    page = reap(store, survey.as_of)
    assert (page.rows, page.changed) == (0, 0)
    assert the_job(conn, job)["status"] == "processing"
    assert the_events(conn) == []


def test_a_worker_that_finishes_after_the_survey_has_finished(store: PgStore, conn: Connection) -> None:
    job = a_queued_job(conn)
    (claim,) = claim_next(conn, "jobs", "worker-1")
    expire_now(conn)
    survey = store.survey()
    assert survey.expired == 1
    finish_job(conn, claim, success=True)
    assert reap(store, survey.as_of).changed == 0
    assert the_job(conn, job)["status"] == "done"


def test_a_job_that_is_claimed_anew_after_the_survey_belongs_to_the_new_worker(
    store: PgStore, conn: Connection
) -> None:
    job = a_job(conn)
    survey = store.survey()
    conn.execute(
        "update jobs set locked_by = 'worker-2', attempt_count = 2, processing_started_at = now(),"
        " last_heartbeat_at = now(), lease_expires_at = now() + interval '5 min'"
    )
    assert reap(store, survey.as_of).changed == 0
    row = the_job(conn, job)
    assert (row["locked_by"], row["attempt_count"], row["status"]) == ("worker-2", 2, "processing")


@pytest.mark.parametrize(
    "move",
    [
        "update jobs set lease_expires_at = now() + interval '5 min', last_heartbeat_at = now()",
        "update jobs set status = 'done', locked_by = null, lease_expires_at = null",
        "update jobs set locked_by = 'worker-2', attempt_count = 2, processing_started_at = now(),"
        " last_heartbeat_at = now(), lease_expires_at = now() + interval '5 min'",
        "delete from jobs",
    ],
    ids=["beats", "finishes", "is claimed anew", "is deleted"],
)
def test_a_worker_inside_its_transaction_wins_over_the_reaper(
    dsn: str, conn: Connection, other_conn: Connection, move: str
) -> None:
    # The worker holds the row while the pass comes by: the pass skips it and reports it as moved on.
    a_job(conn)
    with other_conn.transaction():
        other_conn.execute(move.encode())
        report = one_pass(dsn)
    assert report.ok
    assert report.tables["jobs"].counts["moved_on"] == 1
    assert the_events(conn) == []
    assert by_status(conn).get("queued") is None


@pytest.mark.parametrize(
    ("move", "status"),
    [
        ("lease_expires_at = now() + interval '5 min', last_heartbeat_at = now()", "processing"),
        ("status = 'done', locked_by = null, lease_expires_at = null", "done"),
        (
            "locked_by = 'worker-2', attempt_count = 2, lease_expires_at = now() - interval '1 s'",
            "processing",
        ),
    ],
    ids=["beats", "finishes", "is claimed anew and expires again"],
)
def test_a_worker_that_commits_while_the_statement_runs_is_not_overwritten(
    dsn: str, conn: Connection, other_conn: Connection, move: str, status: str
) -> None:
    # The statement has its snapshot and stands at the first row, in a row policy that waits for the test's
    # lock. What the worker of the second row commits now is invisible to that snapshot.
    first, second = a_job(conn, lease_age=90), a_job(conn, lease_age=60)
    conn.execute(
        f"""
        do $$ begin create role guarded login; exception when duplicate_object then null; end $$;
        grant select, insert, update on all tables in schema public to guarded;
        create function stand(job uuid) returns bool language plpgsql as $$ begin
            if job = '{first}' then perform pg_advisory_xact_lock_shared(1); end if; return true; end $$;
        alter table jobs enable row level security;
        create policy stand on jobs using (stand(id))""".encode()
    )
    with a_store(dsn.replace("postgres@", "guarded@")) as store, ThreadPoolExecutor(1) as pool:
        survey = store.survey()  # before the lock: only the batch statement may stand there
        with other_conn.transaction():
            other_conn.execute("select pg_advisory_xact_lock(1)")
            running = pool.submit(reap, store, survey.as_of)
            wait_until(lambda: reapers_waiting(conn))
            conn.execute(f"update jobs set {move} where id = %s".encode(), (second,))
        page = running.result(30)
    assert [change.id for change in page.changes] == [str(first)]
    row = the_job(conn, second)
    assert row["status"] == status
    assert the_events(conn, second) == []


def test_the_reaper_that_was_first_fences_the_worker_off(dsn: str, conn: Connection) -> None:
    from reconciler.worker import LeaseLostError

    a_queued_job(conn)
    (claim,) = claim_next(conn, "jobs", "worker-1")
    expire_now(conn)
    one_pass(dsn)
    with pytest.raises(LeaseLostError):
        heartbeat_job(conn, claim)
    with pytest.raises(LeaseLostError):
        finish_job(conn, claim, success=True)
    assert by_status(conn) == {"queued": 1}


# ── locked rows ─────────────────────────────────────────────────────────────────────────────────────


def test_locked_rows_do_not_hide_the_rows_behind_them(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    # Whole pages of locked rows, at the head and in the middle, and a page in which only one is locked.
    jobs = [a_job(conn, lease_age=100 - n) for n in range(12)]
    held = [jobs[n] for n in (0, 1, 2, 3, 6, 9)]
    with other_conn.transaction():
        other_conn.execute("select 1 from jobs where id = any(%s) for update", (held,))
        report = one_pass(dsn, {"batch.size": 2}).tables["jobs"]
    assert set(report.requeued_ids) == {str(job) for job in jobs if job not in held}
    assert report.counts["moved_on"] == len(held)


@pytest.mark.parametrize("lease", ["now() - interval '1 min'", "null", "'infinity'"])
def test_locked_rows_of_one_and_the_same_lease_do_not_hide_others(
    dsn: str, conn: Connection, other_conn: Connection, lease: str
) -> None:
    many_expired(conn, 9)
    conn.execute(f"update jobs set lease_expires_at = {lease}".encode())
    with other_conn.transaction():
        other_conn.execute("select 1 from jobs order by id limit 4 for update")
        report = one_pass(dsn, {"batch.size": 2}).tables["jobs"]
    assert report.counts["requeued"] == 5
    assert one_pass(dsn, {"batch.size": 2}).tables["jobs"].counts["requeued"] == 4


# ── old evidence ────────────────────────────────────────────────────────────────────────────────────


def test_evidence_older_than_two_minutes_acts_on_nothing(store: PgStore, conn: Connection) -> None:
    job = a_job(conn, lease_age=900, start_age=1200)
    for age, changed in ((121, 0), (119, 1)):
        as_of = count_of(conn, "select (now() - make_interval(secs => %s))::text", (age,))
        page = reap(store, as_of)
        assert (page.changed, page.fresh) == (changed, bool(changed))
        assert the_job(conn, job)["status"] == ("queued" if changed else "processing")
