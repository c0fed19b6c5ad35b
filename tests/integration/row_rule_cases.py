"""Random rows for the row rule: every stamp near every threshold, to the microsecond.

The clock stands still while a case is judged (`frozen_dsn`), so a row may lie exactly on a threshold and
both judges must still agree about it. Ages are whole microseconds before that instant.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from reconciler.model import (
    UNKNOWN_RULE,
    BackoffPolicy,
    Job,
    LivenessPolicy,
    Mode,
    Policy,
    Rule,
    Rulebook,
    SlaPolicy,
    Verdict,
)
from reconciler.sla import far_ahead_sec, mercy_sec, stage_lease_sec, start_stale_sec
from tests.postgres import Connection

NOW = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)
HOLDERS = ("h0", "h1", "h2", "h3", 'odd "holder" %s {é}')
STAGES = ("clip", "asr", '100% {odd} "stage" \'')

# Beyond what Python's datetime, an interval or a subtraction can hold; the ages need no precision.
SPECIAL: dict[str, float] = {
    "infinity": -math.inf,
    "-infinity": math.inf,
    "4713-12-31 00:00:00+00 BC": 2.1e11,
    "294276-12-31 00:00:00+00": -9.2e12,
    "12026-01-01 00:00:00+00": -3.1e11,
}

CLOCK = """
create function public.statement_timestamp() returns timestamptz language sql stable
as $$ select pg_catalog.current_setting('test.now')::timestamptz $$
"""


def frozen_dsn(dsn: str, at: datetime) -> str:
    """The same database with a clock that stands: our function comes before pg_catalog's on the path."""
    return make_conninfo(dsn, options=f"-c search_path=public,pg_catalog -c test.now={at.isoformat()}")


@dataclass(frozen=True, slots=True)
class Stamp:
    """What is written into the column, and the age the model sees."""

    text: str | None = None
    age: float | None = None


def at_age(microseconds: int) -> Stamp:
    return Stamp((NOW - timedelta(microseconds=microseconds)).isoformat(), microseconds / 1e6)


@dataclass(frozen=True, slots=True)
class Row:
    """One row, as text for COPY and as the value the model judges."""

    id: UUID
    lease: Stamp
    beat: Stamp
    start: Stamp
    due: Stamp
    job: Job


def older_by(job: Job, seconds: float) -> Job:
    """The same row, seen `seconds` later."""

    def shift(age: float | None) -> float | None:
        return None if age is None else age + seconds

    return replace(
        job,
        lease_age=shift(job.lease_age),
        beat_age=shift(job.beat_age),
        start_age=shift(job.start_age),
        due_age=shift(job.due_age),
    )


def insert(conn: Connection, rows: Sequence[Row]) -> None:
    with (
        conn.cursor() as cursor,
        cursor.copy(
            "copy jobs (id, status, lease_expires_at, last_heartbeat_at, processing_started_at,"
            " next_earliest_run_at, attempt_count, attempts_refunded, max_attempts, stage,"
            " expected_duration_ms, locked_by) from stdin"
        ) as copy,
    ):
        for row in rows:
            job = row.job
            copy.write_row(
                (
                    row.id,
                    "processing",
                    row.lease.text,
                    row.beat.text,
                    row.start.text,
                    row.due.text,
                    job.attempt_count,
                    job.attempts_refunded,
                    job.max_attempts,
                    job.stage,
                    job.expected_duration_ms,
                    job.locked_by,
                )
            )


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────


def random_rows(seed: int, count: int, policy: Policy, rulebook: Rulebook) -> list[Row]:
    """Rows drawn from a seed: hundreds of them would be too many decisions for hypothesis itself."""
    chance = random.Random(seed)
    return [_row(chance, policy, rulebook) for _ in range(count)]


def _row(chance: random.Random, policy: Policy, rulebook: Rulebook) -> Row:
    stage = chance.choice([*policy.sla.factors, *STAGES, "unknown", "", None])
    expected_ms = chance.choice(
        [None, None, 0, -5, 1, 999, 1001, chance.randrange(10**6), chance.randrange(10**8), 2**31 - 1]
    )
    locked_by = chance.choice([None, *HOLDERS, *HOLDERS, "nobody asked about me"])
    rule = rulebook.holders.get(locked_by, rulebook.default) if locked_by else None
    edges = _edges(policy, rulebook, rule or UNKNOWN_RULE, stage_lease_sec(policy.sla, stage, expected_ms))
    lease, beat, start = (_stamp(chance, edges) for _ in range(3))
    if chance.random() < 0.3 and lease.text is not None and lease.age is not None and abs(lease.age) < 1e9:
        start = at_age(round(lease.age * 1e6) + chance.choice([-1, 0, 1]))  # the same run, or an earlier one
    due = _stamp(chance, edges) if chance.random() < 0.3 else Stamp()
    job = Job(
        lease_age=lease.age,
        beat_age=beat.age,
        start_age=start.age,
        due_age=due.age,
        attempt_count=chance.choice([None, -1, 0, 0, 1, 1, 2, 2, 3, 7, 2**31 - 1]),
        attempts_refunded=chance.choice([None, 0, 0, 0, 0, 1, 2, 9, -1]),
        max_attempts=chance.choice([None, None, -1, 0, 1, 2, 3, 3, 4, 2**31 - 1]),
        stage=stage,
        expected_duration_ms=expected_ms,
        locked_by=locked_by,
    )
    return Row(UUID(int=chance.getrandbits(128)), lease, beat, start, due, job)


def _edges(policy: Policy, rulebook: Rulebook, rule: Rule, lease_sec: int) -> list[float]:
    """Every number an age of this row is compared with, alone and in the sums the rule forms."""
    timeout = policy.lease_timeout_sec
    patience = [mercy_sec(policy.liveness, lease_sec), rulebook.grace_sec]
    if rule.other_beat_age is not None:
        patience.append(rule.other_beat_age + 2 * policy.heartbeat_sec)
    bases: list[float] = [0, lease_sec, timeout, start_stale_sec(timeout, lease_sec)]
    bases += [policy.sla.default_lease_sec, -far_ahead_sec(lease_sec), -86_400]
    sums = [base + extra for base in bases for extra in patience]
    ages = [rule.claimed_before_age, rule.min_silence_sec]
    edges = [*bases, *bases, *sums, *(age for age in ages if age is not None)]
    return [edge for edge in edges if math.isfinite(edge)]


def _stamp(chance: random.Random, edges: Sequence[float]) -> Stamp:
    luck = chance.random()
    if luck < 0.2:
        return Stamp()
    if luck < 0.3:
        text = chance.choice([*SPECIAL])
        return Stamp(text, SPECIAL[text])
    edge = round(chance.choice(edges) * 1e6)
    nudges = [
        -1,
        0,
        1,
        -1_000_000,
        1_000_000,
        chance.randrange(-(10**9), 10**9),
        chance.randrange(-(10**12), 10**12),
    ]
    return at_age(edge + chance.choice(nudges))


# ── rulebooks and policies ──────────────────────────────────────────────────────────────────────────


def quarters(least: int, most: int) -> st.SearchStrategy[float]:
    """Seconds that floats and Postgres hold exactly, so that sums of them meet on the microsecond."""
    return st.integers(4 * least, 4 * most).map(lambda n: n / 4)


rules = st.builds(
    Rule,
    verdict=st.sampled_from(Verdict),
    mode=st.sampled_from(Mode),
    claimed_before_age=st.none() | quarters(-500, 50_000),
    other_beat_age=st.none() | quarters(-500, 50_000),
    min_silence_sec=st.none() | quarters(0, 10_000),
    pod=st.none() | st.just({"name": "w-0", "reason": "OOMKilled", "restarts": 2}),
)

# Most books have rules for most holders, and a grace that some ages pass and others do not: left to
# itself hypothesis likes empty books and graces of zero or infinity.
many_rules = st.dictionaries(st.sampled_from(HOLDERS), rules, min_size=3)
rulebooks = st.builds(
    Rulebook,
    holders=st.sampled_from([True, True, True, False]).flatmap(
        lambda asked: many_rules if asked else st.just({})
    ),
    default=st.sampled_from([None, UNKNOWN_RULE]) | rules,
    grace_sec=st.sampled_from([0.0, math.inf, 30.0, 120.0, 600.25, 5_000.0]),
)

policies = st.builds(
    Policy,
    sla=st.builds(
        SlaPolicy,
        default_lease_sec=st.integers(1, 900) | st.integers(1, 100_000),
        factors=st.dictionaries(st.sampled_from(STAGES), st.decimals(Decimal("0.000001"), 10_000, places=6)),
    ),
    backoff=st.builds(
        BackoffPolicy,
        steps_sec=st.lists(st.integers(0, 10_000).map(float), min_size=1, max_size=5).map(tuple),
        base_ms=st.none() | st.integers(0, 100_000),
        max_ms=st.none() | st.integers(0, 10_000_000),
    ),
    liveness=st.builds(LivenessPolicy, defer_factor=quarters(0, 5), defer_max_sec=st.integers(0, 5_000)),
    max_attempts=st.integers(0, 5),
    lease_timeout_sec=st.integers(1, 900) | st.integers(1, 100_000),
    heartbeat_sec=st.integers(1, 60),
)
