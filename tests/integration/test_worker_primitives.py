"""The worker's primitives on a real Postgres: one fenced statement each, on any table the app owns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

from reconciler.errors import TableError
from reconciler.model import Columns, Policy, SlaPolicy, Statuses, TableSpec
from reconciler.sla import stage_lease_sec
from reconciler.worker import (
    ArgumentError,
    Claim,
    LeaseLostError,
    Sdk,
    claim_job,
    claim_next,
    configure,
    end_lease,
    finish_job,
    heartbeat_batch,
    heartbeat_job,
    release_job,
    retry_job,
    set_stage,
)
from reconciler.worker.finish import Ended, ended_as
from tests.factories import a_queued_job, the_job
from tests.postgres import Connection

pytestmark = pytest.mark.every_postgres


@pytest.fixture(autouse=True)
def _sdk() -> Iterator[None]:
    configure(Sdk())
    yield
    configure(None)


def lease_of(conn: Connection, job_id: Any, table: str = "jobs") -> float:
    """The lease's length in seconds, measured from the beat that granted it."""
    row = the_job(conn, job_id, table)
    return float((row["lease_expires_at"] - row["last_heartbeat_at"]).total_seconds())


def a_claim(conn: Connection, **columns: Any) -> Claim:
    claim = claim_job(conn, "jobs", a_queued_job(conn, **columns), "worker-1")
    assert claim is not None
    return claim


# ── claim ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_claim_sets_holder_lease_beat_start_and_attempt_in_one_update(conn: Connection) -> None:
    job = a_queued_job(conn, fail_code="OLD", fail_reason="of an earlier run", due_age=1)
    claim = claim_job(conn, "jobs", job, "worker-1")
    assert claim == Claim("jobs", job, "worker-1", 1, None, 300.0, lease_by_stage=True)
    row = the_job(conn, job)
    assert row["status"] == "processing"
    assert row["locked_by"] == "worker-1"
    assert row["attempt_count"] == 1
    assert row["processing_started_at"] == row["last_heartbeat_at"]
    assert lease_of(conn, job) == 300
    assert row["next_earliest_run_at"] is None
    assert row["fail_code"] is None
    assert row["fail_reason"] is None


def test_duplicate_queue_delivery_is_claimed_once(conn: Connection, other_conn: Connection) -> None:
    job = a_queued_job(conn)
    assert claim_job(conn, "jobs", job, "worker-1") is not None
    assert claim_job(other_conn, "jobs", job, "worker-2") is None
    assert the_job(conn, job)["locked_by"] == "worker-1"


def test_two_claims_at_the_same_instant_give_one_holder(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    job = a_queued_job(conn)
    with other_conn.transaction():
        first = claim_job(other_conn, "jobs", job, "worker-1")  # row locked, not yet committed
        second: list[Claim | None] = []
        thread = threading.Thread(target=lambda: second.append(claim_job(conn, "jobs", job, "worker-2")))
        thread.start()
        with psycopg.connect(dsn, autocommit=True) as observer:
            while not _waits_for_a_lock(observer):
                assert thread.is_alive(), "the second claim should wait for the first"
    thread.join(10)
    assert first is not None
    assert second == [None]


def _waits_for_a_lock(conn: Connection) -> bool:
    row = conn.execute(
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and wait_event_type = 'Lock'"
    ).fetchone()
    assert row is not None
    return bool(row[0])


def test_a_claim_by_id_waits_for_an_app_that_merely_edits_the_row(
    conn: Connection, other_conn: Connection
) -> None:
    job = a_queued_job(conn)
    claims: list[Claim | None] = []
    with other_conn.transaction():
        other_conn.execute("update jobs set stage = 'clip' where id = %s", (job,))
        thread = threading.Thread(target=lambda: claims.append(claim_job(conn, "jobs", job, "worker-1")))
        thread.start()
    thread.join(10)
    assert claims[0] is not None
    assert claims[0].stage == "clip"


@pytest.mark.parametrize(
    ("columns", "claimable"),
    [
        ({"attempt": 2, "max_attempts": 3}, True),
        ({"attempt": 3, "max_attempts": 3}, False),
        ({"attempt": 3, "max_attempts": 3, "refunded": 1}, True),
        ({"attempt": 0, "max_attempts": 0}, False),
        ({"attempt": 0, "max_attempts": -1}, False),
        ({"attempt": 0, "max_attempts": 0, "refunded": 5}, False),
        ({"due_age": -60}, False),
        ({"due_age": 1}, True),
    ],
)
def test_a_claim_refuses_exhausted_and_early_jobs(
    conn: Connection, columns: dict[str, Any], claimable: bool
) -> None:
    job = a_queued_job(conn, **columns)
    assert bool(claim_next(conn, "jobs", "worker-1")) is claimable
    if not claimable:
        assert claim_job(conn, "jobs", job, "worker-1") is None
        assert the_job(conn, job)["status"] == "queued"


def test_claim_next_gives_each_job_to_one_of_two_open_transactions(
    conn: Connection, other_conn: Connection
) -> None:
    jobs = {a_queued_job(conn) for _ in range(5)}
    with conn.transaction(), other_conn.transaction():
        first = claim_next(conn, "jobs", "worker-1", limit=3)
        second = claim_next(other_conn, "jobs", "worker-2", limit=3)
    assert len(first) == 3
    assert len(second) == 2
    assert {claim.id for claim in first + second} == jobs


def test_claim_next_takes_only_the_asked_stages(conn: Connection) -> None:
    a_queued_job(conn, stage="clip")
    a_queued_job(conn, stage=None)
    asr = a_queued_job(conn, stage="asr")
    assert [claim.id for claim in claim_next(conn, "jobs", "w", stages=["asr", "burnin"], limit=9)] == [asr]
    assert claim_next(conn, "jobs", "w", stages=[], limit=9) == []


def test_a_job_due_again_is_claimed_before_fresh_ones(conn: Connection) -> None:
    a_queued_job(conn)
    again = a_queued_job(conn, due_age=5, attempt=1)
    assert [claim.id for claim in claim_next(conn, "jobs", "w")] == [again]


def test_a_claim_is_not_hidden_by_a_child_row_that_is_being_inserted(
    conn: Connection, other_conn: Connection
) -> None:
    conn.execute("create table children (job_id uuid references jobs)")
    job = a_queued_job(conn)
    with other_conn.transaction():
        other_conn.execute("insert into children values (%s)", (job,))  # key-share lock on the job
        assert [claim.id for claim in claim_next(conn, "jobs", "w")] == [job]


# ── requirement 3: the lease follows the stage ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("stage", "expected_ms"),
    [
        ("clip", 100_000), ("asr", 100_000), ("burnin", 100_000), ("clip", 50_001), ("clip", None),
        (None, 100_000), ("unheard-of", 10**9), ("clip", 1), ("asr", 2**31 - 1), ("clip", 2**62),
    ],
)  # fmt: skip
def test_requirement_3_a_claim_sets_the_lease_by_stage_and_sla_factor(
    conn: Connection, stage: str | None, expected_ms: int | None
) -> None:
    conn.execute("alter table jobs alter expected_duration_ms type bigint")
    claim = a_claim(conn, stage=stage, expected_ms=expected_ms)
    expected = stage_lease_sec(SlaPolicy(), stage, expected_ms)
    assert lease_of(conn, claim.id) == expected
    assert claim.lease_sec == expected


def test_requirement_3_factors_are_exact_and_come_from_configuration(conn: Connection) -> None:
    sdk = Sdk(Policy(sla=SlaPolicy(default_lease_sec=1, factors={"thumb": Decimal("1.1")})))
    job = a_queued_job(conn, stage="thumb", expected_ms=10_000)
    claim = claim_job(conn, "jobs", job, "w", sdk=sdk)
    assert claim is not None
    assert lease_of(conn, job) == 11  # a float would say 12


def test_an_explicit_lease_is_kept_by_every_beat(conn: Connection) -> None:
    job = a_queued_job(conn, stage="asr", expected_ms=10**6)
    claim = claim_job(conn, "jobs", job, "w", lease_sec=42)
    assert claim is not None
    assert claim.lease_sec == 42
    assert lease_of(conn, job) == 42
    heartbeat_job(conn, claim)
    assert lease_of(conn, job) == 42
    heartbeat_batch(conn, [claim])
    assert lease_of(conn, job) == 42
    later = heartbeat_job(conn, claim, 77)
    assert lease_of(conn, job) == 77
    heartbeat_job(conn, later)
    assert lease_of(conn, job) == 77


def test_set_stage_changes_stage_and_lease_together(conn: Connection) -> None:
    claim = a_claim(conn, stage="clip", expected_ms=100_000)
    next_claim = set_stage(conn, claim, "asr")
    assert next_claim.stage == "asr"
    assert the_job(conn, claim.id)["stage"] == "asr"
    assert lease_of(conn, claim.id) == 1200
    longer = set_stage(conn, next_claim, "burnin", expected_duration_ms=200_000)
    assert longer.lease_sec == lease_of(conn, claim.id) == 1600
    assert set_stage(conn, longer, "upload").lease_sec == 300


# ── requirement 4: beats ────────────────────────────────────────────────────────────────────────────


def test_requirement_4_a_beat_stamps_now_and_extends_the_lease_by_the_stage(conn: Connection) -> None:
    claim = a_claim(conn, stage="clip", expected_ms=100_000)
    conn.execute(
        "update jobs set lease_expires_at = now(), last_heartbeat_at = now() - interval '1 h',"
        " processing_started_at = now() - interval '1 h'"
    )
    heartbeat_job(conn, claim)
    row = conn.execute(
        "select last_heartbeat_at > now() - interval '5 s',"
        " lease_expires_at - last_heartbeat_at = interval '600 s' from jobs"
    ).fetchone()
    assert row == (True, True)


def test_a_beat_is_later_than_its_claim_even_in_one_transaction(conn: Connection) -> None:
    with conn.transaction():
        claim = a_claim(conn)
        heartbeat_job(conn, claim)
    row = the_job(conn, claim.id)
    assert row["last_heartbeat_at"] > row["processing_started_at"]


def test_a_beat_is_later_than_its_claim_after_the_clock_was_set_back(conn: Connection) -> None:
    claim = a_claim(conn)
    conn.execute("update jobs set processing_started_at = now() + interval '10 min'")
    heartbeat_batch(conn, [claim])
    row = the_job(conn, claim.id)
    assert row["last_heartbeat_at"] > row["processing_started_at"]


def test_a_batch_beats_all_active_jobs_of_both_tables(conn: Connection) -> None:
    claims = [a_claim(conn) for _ in range(3)]
    asr = claim_job(conn, "asr_jobs", a_queued_job(conn, "asr_jobs"), "worker-1", 50)
    assert asr is not None
    claims.append(asr)
    conn.execute("update jobs set lease_expires_at = now()")
    beats = heartbeat_batch(conn, claims)
    assert {claim.id for claim in beats.beaten} == {claim.id for claim in claims}
    assert not beats.busy
    assert not beats.lost
    assert [lease_of(conn, claim.id) for claim in claims[:3]] == [300, 300, 300]
    assert lease_of(conn, asr.id, "asr_jobs") == 50


def test_ten_thousand_jobs_are_beaten_by_one_statement(conn: Connection) -> None:
    conn.execute("insert into jobs (status) select 'queued' from generate_series(1, 10000)")
    claims = claim_next(conn, "jobs", "w", limit=10_000)
    assert len(claims) == 10_000
    beats = heartbeat_batch(conn, claims)
    assert len(beats.beaten) == 10_000
    beaten = conn.execute("select count(distinct last_heartbeat_at), count(*) from jobs"
                          " where last_heartbeat_at > processing_started_at").fetchone()  # fmt: skip
    assert beaten == (1, 10_000)


def test_a_row_locked_by_the_app_does_not_stop_the_beats_of_the_others(
    conn: Connection, other_conn: Connection
) -> None:
    free, locked, lost = a_claim(conn), a_claim(conn), a_claim(conn)
    release_job(conn, lost)
    with other_conn.transaction():
        other_conn.execute("select from jobs where id = %s for update", (locked.id,))
        beats = heartbeat_batch(conn, [free, locked, lost])
    assert [claim.id for claim in beats.beaten] == [free.id]
    assert [claim.id for claim in beats.busy] == [locked.id]
    assert [claim.id for claim in beats.lost] == [lost.id]
    assert [claim.id for claim in heartbeat_batch(conn, [locked]).beaten] == [locked.id]


# ── the fence ───────────────────────────────────────────────────────────────────────────────────────

ENDINGS: dict[str, Any] = {
    "heartbeat": heartbeat_job,
    "set_stage": lambda conn, claim: set_stage(conn, claim, "asr"),
    "done": lambda conn, claim: finish_job(conn, claim, success=True),
    "failed": lambda conn, claim: finish_job(conn, claim, success=False, code="X", reason="y"),
    "retry": lambda conn, claim: retry_job(conn, claim, code="X"),
    "release": release_job,
    "end_lease": end_lease,
}


@pytest.mark.parametrize("act", ENDINGS.values(), ids=ENDINGS.keys())
@pytest.mark.parametrize(
    "moved_on",
    [
        "update jobs set locked_by = 'worker-2'",
        "update jobs set attempt_count = attempt_count + 1",
        "update jobs set status = 'queued'",
        "update jobs set status = 'done', locked_by = null",
        "delete from jobs",
    ],
)
def test_a_zombie_changes_nothing(conn: Connection, act: Any, moved_on: str) -> None:
    claim = a_claim(conn)
    conn.execute(moved_on)
    before = conn.execute("select * from jobs").fetchall()
    with pytest.raises(LeaseLostError, match="no longer held by worker-1"):
        act(conn, claim)
    assert conn.execute("select * from jobs").fetchall() == before
    assert heartbeat_batch(conn, [claim]).lost == (claim,)


def test_the_same_worker_cannot_finish_a_later_run_with_an_earlier_claim(conn: Connection) -> None:
    first = a_claim(conn)
    release_job(conn, first)
    second = claim_job(conn, "jobs", first.id, "worker-1")
    assert second is not None
    assert second.attempt == 2
    with pytest.raises(LeaseLostError):
        finish_job(conn, first, success=True)
    finish_job(conn, second, success=True)


# ── endings ─────────────────────────────────────────────────────────────────────────────────────────


def assert_not_held(row: dict[str, Any]) -> None:
    for column in ("locked_by", "lease_expires_at", "last_heartbeat_at", "processing_started_at"):
        assert row[column] is None


def test_finish_clears_the_lock_fields_and_says_done(conn: Connection) -> None:
    claim = a_claim(conn)
    finish_job(conn, claim, success=True)
    row = the_job(conn, claim.id)
    assert row["status"] == "done"
    assert row["attempt_count"] == 1
    assert_not_held(row)
    assert ended_as(conn, claim) == Ended("done", None, delayed=False)


def test_finish_without_success_always_fails_with_code_and_reason(conn: Connection) -> None:
    claim = a_claim(conn, max_attempts=9)
    finish_job(conn, claim, success=False, code="FFMPEG", reason="moov atom\x00not found")
    row = the_job(conn, claim.id)
    assert (row["status"], row["fail_code"], row["fail_reason"]) == (
        "failed",
        "FFMPEG",
        "moov atom�not found",
    )
    assert_not_held(row)


def test_retry_queues_with_growing_delays_and_fails_when_exhausted(conn: Connection) -> None:
    job = a_queued_job(conn, max_attempts=4)
    for asked in (30, 120, 600):
        claim = claim_job(conn, "jobs", job, "w")
        assert claim is not None
        retried = retry_job(conn, claim, code="UPSTREAM_FAILURE", reason="502")
        assert retried.requeued
        assert retried.delay_sec is not None
        assert asked <= retried.delay_sec <= asked * 1.1
        row = the_job(conn, job)
        assert (row["status"], row["fail_code"]) == ("queued", "UPSTREAM_FAILURE")
        assert_not_held(row)
        assert claim_next(conn, "jobs", "w") == []  # not due
        delay = conn.execute("select extract(epoch from next_earliest_run_at - now())::float8 from jobs")
        assert asked - 5 <= delay.fetchone()[0] <= retried.delay_sec  # type: ignore[index]
        conn.execute("update jobs set next_earliest_run_at = now()")
    last = claim_job(conn, "jobs", job, "w")
    assert last is not None
    assert last.attempt == 4
    assert not retry_job(conn, last, code="UPSTREAM_FAILURE").requeued
    row = the_job(conn, job)
    assert (row["status"], row["fail_code"], row["fail_reason"]) == (
        "failed", "UPSTREAM_FAILURE", "retries_exhausted",
    )  # fmt: skip
    assert row["next_earliest_run_at"] is None


def test_release_gives_back_at_once_and_refunds_the_attempt(conn: Connection) -> None:
    job = a_queued_job(conn, max_attempts=1)
    for attempt in (1, 2, 3):
        claim = claim_job(conn, "jobs", job, "w")
        assert claim is not None
        assert claim.attempt == attempt  # the token grows, the budget does not shrink
        release_job(conn, claim)
        row = the_job(conn, job)
        assert (row["status"], row["attempts_refunded"], row["next_earliest_run_at"]) == (
            "queued",
            attempt,
            None,
        )
        assert_not_held(row)


def test_an_ended_lease_leaves_the_status_to_the_reaper(conn: Connection) -> None:
    claim = a_claim(conn)
    end_lease(conn, claim)
    row = conn.execute("select status, lease_expires_at <= clock_timestamp() from jobs").fetchone()
    assert row == ("processing", True)


def test_only_a_claim_after_a_dead_run_counts_as_recovered(conn: Connection) -> None:
    from reconciler.worker.metrics import RECOVERED_JOBS

    before = RECOVERED_JOBS.value(reason="stale")
    fresh = a_claim(conn)
    assert not fresh.recovered
    release_job(conn, fresh)
    again = claim_job(conn, "jobs", fresh.id, "w")
    assert again is not None
    assert not again.recovered
    retry_job(conn, again, code="X")
    conn.execute("update jobs set next_earliest_run_at = now()")
    retried = claim_job(conn, "jobs", fresh.id, "w")
    assert retried is not None
    assert not retried.recovered
    # What the reaper leaves behind: queued with a delay, no code.
    assert a_claim(conn, attempt=1, due_age=1).recovered
    assert RECOVERED_JOBS.value(reason="stale") == before + 1


# ── any table the app owns ──────────────────────────────────────────────────────────────────────────

ODD = Sdk(
    Policy(max_attempts=2),
    {
        "odd": TableSpec(
            name="odd",
            schema="App",
            table="Job Queue",
            columns=Columns(
                id="ID", status="State", locked_by="holder", attempt_count="tries",
                attempts_refunded="refunds", stage="Phase", lease_expires_at="lease %s", fail_code="{why}",
            ),
            statuses=Statuses(queued="PENDING", processing="RUNNING", done="COMPLETED", failed="FAILED"),
        )
    },
)  # fmt: skip


@pytest.mark.parametrize("max_attempts", ["", ", max_attempts int", ", max_attempts smallint default 2"])
@pytest.mark.parametrize(
    ("id_type", "job_id"),
    [
        ("uuid", uuid4()),
        ("bigint", 2**40),
        ("int", 7),
        ("text", "../a'b"),
        ("varchar(20)", "x"),
        ("char(5)", "ab"),
    ],
)
def test_odd_tables_are_served(conn: Connection, id_type: str, job_id: Any, max_attempts: str) -> None:
    conn.execute(
        f"""
        create schema "App";
        create type state as enum ('PENDING', 'RUNNING', 'COMPLETED', 'FAILED');
        create type phase as enum ('clip', 'asr');
        create domain tally as smallint default 0;
        create table "App"."Job Queue" (
            "ID" {id_type} primary key, "State" state not null default 'PENDING', holder varchar(80),
            "lease %s" timestamptz, last_heartbeat_at timestamptz, processing_started_at timestamptz,
            tries smallint not null default 0, refunds smallint not null default 0 {max_attempts},
            "{{why}}" text, fail_reason text, "Phase" phase, next_earliest_run_at timestamptz,
            expected_duration_ms int)
        """
    )
    conn.execute('insert into "App"."Job Queue" ("ID", "Phase") values (%s, %s)', (job_id, "clip"))
    for attempt in (1, 2):
        (claim,) = claim_next(conn, "odd", "w", stages=["clip", "nonsense"], sdk=ODD)
        assert claim.attempt == attempt
        claim = set_stage(conn, claim, "asr", sdk=ODD)
        heartbeat_job(conn, claim, sdk=ODD)
        assert heartbeat_batch(conn, [claim], sdk=ODD).beaten == (claim,)
        by_text = replace(claim, id=str(job_id))
        assert len(heartbeat_batch(conn, [by_text], sdk=ODD).beaten) == 1
        end_lease(conn, claim, sdk=ODD)
        retried = retry_job(conn, claim, code="X", sdk=ODD)
        assert retried.requeued is (attempt == 1)
        conn.execute("""update "App"."Job Queue" set next_earliest_run_at = null, "Phase" = 'clip'""")
    conn.execute("""update "App"."Job Queue" set "State" = 'PENDING', refunds = 2""")
    last = claim_job(conn, "odd", job_id, "w", sdk=ODD)
    assert last is not None
    release_job(conn, last, sdk=ODD)
    last = claim_job(conn, "odd", str(job_id), "w", sdk=ODD)
    assert last is not None
    finish_job(conn, last, success=True, sdk=ODD)
    with pytest.raises(ArgumentError, match="phase"):
        set_stage(conn, last, "nonsense", sdk=ODD)


def test_counters_saturate_instead_of_freezing_the_queue(conn: Connection) -> None:
    conn.execute("alter table jobs alter attempt_count type smallint, alter attempts_refunded type smallint")
    job = a_queued_job(conn, attempt=32767, refunded=32767)
    claim = claim_job(conn, "jobs", job, "w")
    assert claim is not None
    assert claim.attempt == 32767
    release_job(conn, claim)
    assert the_job(conn, job)["attempts_refunded"] == 32767


def test_a_null_max_attempts_means_the_configured_one(conn: Connection) -> None:
    conn.execute("alter table jobs alter max_attempts drop not null")
    a_queued_job(conn, max_attempts=None, attempt=3)
    ok = a_queued_job(conn, max_attempts=None, attempt=2)
    assert [claim.id for claim in claim_next(conn, "jobs", "w", limit=5)] == [ok]


def test_a_table_that_was_not_migrated_is_named_in_the_error(conn: Connection) -> None:
    conn.execute("alter table jobs drop column attempts_refunded")
    with pytest.raises(TableError, match=r"attempts_refunded.*job-reaper migrate"):
        claim_next(conn, "jobs", "w")


# ── any connection ──────────────────────────────────────────────────────────────────────────────────


def test_a_primitive_follows_the_callers_transaction(conn: Connection) -> None:
    claim = a_claim(conn)
    conn.execute("begin")
    finish_job(conn, claim, success=True)
    conn.execute("rollback")
    assert the_job(conn, claim.id)["status"] == "processing"


@pytest.mark.parametrize("cursor", [psycopg.Cursor, psycopg.ClientCursor, psycopg.RawCursor])
def test_row_and_cursor_factories_of_the_app_do_not_matter(dsn: str, conn: Connection, cursor: Any) -> None:
    job = a_queued_job(conn)
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row, cursor_factory=cursor) as odd:
        claim = claim_job(odd, "jobs", job, "w")
        assert claim is not None
        heartbeat_batch(odd, [claim])
        retry_job(odd, claim, code="X")


def test_the_primitives_are_awaitable_on_an_async_connection(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn, stage="clip")

    async def life() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as aconn:
            (claim,) = await claim_next(aconn, "jobs", "w")
            assert claim.id == job
            claim = await heartbeat_job(aconn, claim)
            assert (await heartbeat_batch(aconn, [claim])).beaten == (claim,)
            await finish_job(aconn, await set_stage(aconn, claim, "asr"), success=True)
            with pytest.raises(LeaseLostError):
                await heartbeat_job(aconn, claim)

    asyncio.run(life())
    assert the_job(conn, job)["status"] == "done"


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────

WRONG: dict[str, Any] = {"stage": 7, "success": "yes", "reason": b"x"}
BAD: dict[str, tuple[Any, str]] = {
    "unknown table": (lambda c, _: claim_next(c, "jbos", "w"), "table='jbos': allowed: jobs, asr_jobs"),
    "negative lease": (lambda c, _: claim_next(c, "jobs", "w", lease_sec=-1), "lease_sec=-1"),
    "no lease": (lambda c, k: heartbeat_job(c, k, 0), "lease_sec=0"),
    "lease of nan": (lambda c, k: heartbeat_job(c, k, float("nan")), "lease_sec=nan"),
    "lease for ever": (lambda c, k: heartbeat_job(c, k, float("inf")), "lease_sec=inf"),
    "no name": (lambda c, _: claim_next(c, "jobs", " "), "worker_id=' '"),
    "no limit": (lambda c, _: claim_next(c, "jobs", "w", limit=0), "limit=0"),
    "stages as a word": (lambda c, _: claim_next(c, "jobs", "w", stages="clip"), r"write \['clip'\]"),
    "empty stage": (lambda c, k: set_stage(c, k, ""), "stage=''"),
    "stage of a wrong type": (lambda c, k: set_stage(c, k, WRONG["stage"]), "stage=7"),
    "negative duration": (
        lambda c, k: set_stage(c, k, "a", expected_duration_ms=-1),
        "expected_duration_ms=-1",
    ),
    "id of a wrong type": (lambda c, _: claim_job(c, "jobs", "no-uuid", "w"), "uuid"),
    "success is no bool": (lambda c, k: finish_job(c, k, success=WRONG["success"]), "success='yes'"),
    "a failure of a success": (
        lambda c, k: finish_job(c, k, success=True, code="X"),
        "only for success=False",
    ),
    "retry without a code": (lambda c, k: retry_job(c, k, code=""), "code=''"),
    "reason of a wrong type": (lambda c, k: retry_job(c, k, code="X", reason=WRONG["reason"]), "reason=b'x'"),
}


@pytest.mark.parametrize(("call", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_by_name_and_leaves_the_job_as_it_was(
    conn: Connection, call: Any, says: str
) -> None:
    claim = a_claim(conn)
    before = the_job(conn, claim.id)
    with pytest.raises(ArgumentError, match=says):
        call(conn, claim)
    assert the_job(conn, claim.id) == before


def test_a_beat_that_waited_long_does_not_shorten_a_later_lease(conn: Connection) -> None:
    claim = a_claim(conn)
    conn.execute(
        "update jobs set last_heartbeat_at = now() + interval '50 s',"
        " lease_expires_at = now() + interval '350 s'"
    )
    for beat in (lambda: heartbeat_job(conn, claim), lambda: heartbeat_batch(conn, [claim])):
        beat()
        left = conn.execute("select lease_expires_at > now() + interval '340 s' from jobs").fetchone()
        assert left == (True,)
        conn.execute("update jobs set last_heartbeat_at = now() + interval '50 s'")
