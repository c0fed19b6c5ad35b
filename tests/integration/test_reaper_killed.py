"""kill -9 of a real `job-reaper once` at each of its steps: no event lost, no row half done, and the next
pass finishes the work.

The process is provably where the test wants it: it stands at a lock the test holds, and Postgres says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.postgres import Connection, wait_until
from tests.reaping import (
    by_status,
    count_of,
    ended,
    many_expired,
    once,
    one_event_per_change,
    reapers_waiting,
    started,
)

JOBS, BATCH = 20, 5

# Where the process stands when it is killed, and how many rows are committed by then.
STEPS = {
    "before its turn": ("before insert on reaper_state for each row when (new.scope like 'pass:%')", 0),
    "updating rows": ("before update on jobs for each row", 0),
    "writing events": ("after insert on job_events", 0),
    "counting": (
        "before insert or update on reaper_state for each row when (new.scope like 'counters:%')",
        0,
    ),
    "committing": ("after insert on job_events deferrable initially deferred for each row", 0),
    "in its second batch": ("before update on jobs for each row", BATCH),
    "in its last batch": ("before update on jobs for each row", JOBS - BATCH),
    "giving its turn back": ("before update on reaper_state for each row when (new.until <= now())", JOBS),
}


def a_place_to_stand(conn: Connection, trigger: str, after: int) -> None:
    """A trigger that waits for the test's lock once so many events are committed."""
    conn.execute(
        "create function stand() returns trigger language plpgsql as $$ begin"
        f" if (select count(*) from job_events) >= {after} then"
        " perform pg_advisory_xact_lock_shared(1); end if;"
        " return case when tg_when = 'BEFORE' then new end; end $$".encode()
    )
    kind = "constraint trigger" if "deferrable" in trigger else "trigger"
    conn.execute(f"create {kind} stand {trigger} execute function stand()".encode())


@contextmanager
def killed_while_standing(
    dsn: str, conn: Connection, other_conn: Connection, *, noticed: bool = True
) -> Iterator[None]:
    """Run the pass into the lock, kill it there, and let the lock go once Postgres has noticed (or not)."""
    with other_conn.transaction():
        other_conn.execute("select pg_advisory_xact_lock(1)")
        process = started(dsn, "once", REAPER_BATCH_SIZE=str(BATCH), REAPER_TABLES="jobs")
        try:
            (backend,) = wait_until(lambda: reapers_waiting(conn), process.poll, timeout_sec=60)
        finally:
            process.kill()
            ended(process)
        yield
        # Left alone, the server finds out that its client is gone only when it wants to answer.
        if noticed:
            conn.execute("select pg_terminate_backend(%s, 10000)", (backend,))
    gone = "select count(*) = 0 from pg_stat_activity where pid = %s"
    wait_until(lambda: count_of(conn, gone, (backend,)), "the dead reaper's session is still there")


@pytest.mark.parametrize("step", STEPS)
def test_a_reaper_killed(dsn: str, conn: Connection, other_conn: Connection, step: str) -> None:
    trigger, committed = STEPS[step]
    many_expired(conn, JOBS)
    a_place_to_stand(conn, trigger, committed)
    with killed_while_standing(dsn, conn, other_conn):
        done = by_status(conn).get("queued", 0)
        assert done == committed
        assert one_event_per_change(conn)
    assert by_status(conn) == {
        status: n for status, n in (("queued", committed), ("processing", JOBS - committed)) if n
    }
    assert one_event_per_change(conn)
    # Its turn is still taken in its name, for a while: whoever comes now steps back and says so.
    held = count_of(conn, "select count(*) from reaper_state where scope = 'pass:jobs' and until > now()")
    env = {"REAPER_BATCH_SIZE": str(BATCH), "REAPER_TABLES": "jobs"}
    if held:
        assert once(dsn, **env).json["skipped"] is not None
        conn.execute("update reaper_state set until = now() where scope = 'pass:jobs'")  # time passes
    report = once(dsn, **env).json
    assert report["ok"]
    assert report["tables"]["jobs"]["counts"]["requeued"] == JOBS - committed
    assert by_status(conn) == {"queued": JOBS}
    assert one_event_per_change(conn)
    counted = "select coalesce(sum(value::int), 0) from reaper_state, jsonb_each_text(counters)"
    assert count_of(conn, counted) == JOBS, "the counters commit with the rows"


@pytest.mark.parametrize(("step", "done"), [("updating rows", 0), ("committing", BATCH)])
def test_a_session_that_outlives_its_killed_reaper_does_all_or_nothing(
    dsn: str, conn: Connection, other_conn: Connection, step: str, done: int
) -> None:
    # Nobody tells Postgres: it finishes the statement it stands in. Only a COMMIT that it had already is one.
    many_expired(conn, JOBS)
    a_place_to_stand(conn, *STEPS[step])
    with killed_while_standing(dsn, conn, other_conn, noticed=False):
        assert by_status(conn) == {"processing": JOBS}
    assert by_status(conn).get("queued", 0) == done
    assert one_event_per_change(conn)


def test_a_dead_reapers_turn_never_blocks_longer_than_it_was_taken_for(dsn: str, conn: Connection) -> None:
    many_expired(conn, 1)
    conn.execute("insert into reaper_state (scope, holder, until) values ('pass:asr_jobs,jobs', 'x', now())")
    once(dsn)
    longest = count_of(conn, "select extract(epoch from max(until) - now())::float8 from reaper_state")
    assert longest <= 0, "given back"
    assert by_status(conn) == {"queued": 1}
