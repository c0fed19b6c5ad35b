"""The row rule, line by line (SPEC.md decisions 2, 3, 5, 6), and what holds for every row."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reconciler.decide import INT_MAX, Kind, decide, judged_stamp
from reconciler.model import (
    UNKNOWN_RULE,
    BackoffPolicy,
    Decision,
    EventType,
    Job,
    LivenessPolicy,
    Mode,
    Outcome,
    Policy,
    Reason,
    Rule,
    Rulebook,
    SlaPolicy,
    Verdict,
)
from reconciler.sla import mercy_sec, stage_lease_sec

DEFAULTS = Policy()
NOBODY_ASKED = Rulebook()
DAY = 86_400.0
NEVER = -math.inf  # the age of 'infinity'
EVER = math.inf  # the age of '-infinity'

ALIVE = Rule(Verdict.ALIVE, Mode.CAPPED)
CONFIRMED = Rule(Verdict.DEAD_CONFIRMED, Mode.NOW)
INFERRED = Rule(Verdict.DEAD_INFERRED, Mode.EXPIRED)
INFERRED_EARLY = Rule(Verdict.DEAD_INFERRED, Mode.NOW, min_silence_sec=60.0)


def a_row(
    lease_age: float | None = 60.0,
    beat_age: float | None = 360.0,
    start_age: float | None = 600.0,
    *,
    attempt: int | None = 1,
    max_attempts: int | None = 3,
    refunded: int | None = 0,
    due_age: float | None = None,
    stage: str | None = None,
    expected_ms: int | None = None,
    locked_by: str | None = "w",
) -> Job:
    """By default: claimed 10 min ago, silent for 6, expired for 1."""
    return Job(
        lease_age,
        beat_age,
        start_age,
        due_age,
        attempt,
        refunded,
        max_attempts,
        stage,
        expected_ms,
        locked_by,
    )


def unleased(
    beat_age: float | None = None,
    start_age: float | None = None,
    *,
    attempt: int | None = 0,
    max_attempts: int | None = 3,
    refunded: int | None = 0,
) -> Job:
    """A row of a worker that sets no lease and does not count at claim."""
    return a_row(None, beat_age, start_age, attempt=attempt, max_attempts=max_attempts, refunded=refunded)


def judged_by(rule: Rule | None, grace_sec: float = 0.0) -> Rulebook:
    return Rulebook({} if rule is None else {"w": rule}, default=None, grace_sec=grace_sec)


def brief(decision: Decision) -> tuple[object, ...]:
    return decision.outcome, decision.reason, decision.event


LIVE = (Outcome.LIVE, None, None)
UNLEASED = (Outcome.UNLEASED, None, None)
DEFERRED = (Outcome.DEFERRED, None, None)
NOT_DUE = (Outcome.NOT_DUE, None, None)
NO_RULE = (Outcome.NO_RULE, None, None)
REQUEUED = (Outcome.REQUEUED, Reason.LEASE_EXPIRED, EventType.REQUEUED)
REQUEUED_STALE = (Outcome.REQUEUED, Reason.STALE, EventType.REQUEUED_STALE)
REQUEUED_EARLY = (Outcome.REQUEUED, Reason.POD_DEAD, EventType.REQUEUED)
REQUEUED_CAPPED = (Outcome.REQUEUED, Reason.DEFER_CAP, EventType.REQUEUED)
REQUEUED_DROPPED = (Outcome.REQUEUED, Reason.DROPPED, EventType.REQUEUED)
TIMED_OUT = (Outcome.FAILED, Reason.LEASE_EXPIRED, EventType.FAILED_TIMEOUT)
WORN_OUT = (Outcome.FAILED, Reason.STALE, EventType.FAILED_RETRIES_EXHAUSTED)
WORKER_LOST = (Outcome.FAILED, Reason.POD_DEAD, EventType.FAILED_WORKER_LOST)


# ── decision 2: which stamp decides ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        pytest.param(a_row(1e-6), REQUEUED, id="a lease that just ran out has expired"),
        pytest.param(a_row(0.0), LIVE, id="a lease that ends now has not"),
        pytest.param(a_row(-300.0), LIVE, id="a lease ahead is alive whatever the beat says"),
        pytest.param(a_row(EVER, start_age=None), REQUEUED, id="a lease of -infinity has expired"),
        pytest.param(a_row(60, None, None), REQUEUED, id="a lease alone is enough"),
        pytest.param(unleased(300.0), LIVE, id="a beat exactly at the timeout is not stale"),
        pytest.param(unleased(300.1), REQUEUED_STALE, id="a beat beyond the timeout is stale"),
        pytest.param(unleased(10.0, 1e6), LIVE, id="a fresh beat outweighs an old start"),
        pytest.param(unleased(None, 301.0), LIVE, id="a start without a beat gets an hour"),
        pytest.param(unleased(None, 3600.0), LIVE, id="and the hour is not over at the hour"),
        pytest.param(unleased(None, 3600.1), REQUEUED_STALE, id="then it is stale"),
        pytest.param(unleased(EVER), REQUEUED_STALE, id="a beat of -infinity is stale"),
        pytest.param(unleased(None, EVER), REQUEUED_STALE, id="a start of -infinity is stale"),
        pytest.param(unleased(), UNLEASED, id="without any stamp a row is never touched"),
        pytest.param(unleased(NEVER, NEVER), UNLEASED, id="infinity is no stamp"),
        pytest.param(unleased(NEVER, 4000.0), REQUEUED_STALE, id="a beat of infinity leaves the start"),
        pytest.param(unleased(-DAY), LIVE, id="a beat up to a day ahead is a skewed clock"),
        pytest.param(unleased(-DAY - 1), UNLEASED, id="a beat further ahead says nothing"),
        pytest.param(unleased(-1e10, 4000.0), REQUEUED_STALE, id="and leaves the start"),
        pytest.param(
            a_row(700.0, 10.0, 600.0), LIVE, id="a lease that ended before the start is an earlier run's"
        ),
        pytest.param(a_row(700.0, 301.0, 600.0), REQUEUED_STALE, id="its row is judged by the beat"),
        pytest.param(a_row(700.0, None, 600.0), LIVE, id="or by the start"),
        pytest.param(a_row(5000.0, None, 4000.0), REQUEUED_STALE, id="which can be stale too"),
        pytest.param(a_row(600.0, 10.0, 600.0), REQUEUED, id="a lease that ended at the start is this run's"),
        pytest.param(
            a_row(60.0, None, -5.0), LIVE, id="a start seconds ahead still makes the lease an earlier run's"
        ),
        pytest.param(
            a_row(60.0, None, -1e10), REQUEUED, id="a start in the year 3000 does not save an expired lease"
        ),
        pytest.param(a_row(60.0, None, NEVER), REQUEUED, id="nor does a start of infinity"),
        pytest.param(a_row(-100.0, 9999.0, -200.0), LIVE, id="a lease that still runs is nobody's past"),
        pytest.param(a_row(-DAY, 9999.0), LIVE, id="a lease a day ahead is believed"),
        pytest.param(a_row(-DAY - 1, 301.0), REQUEUED, id="one further ahead is judged by the beat"),
        pytest.param(a_row(-DAY - 1, 300.0), LIVE, id="and lives while that is fresh"),
        pytest.param(a_row(NEVER, 301.0), REQUEUED, id="a lease of infinity is judged by the beat"),
        pytest.param(a_row(NEVER, None, 301.0), REQUEUED, id="or by the start, without the hour"),
        pytest.param(a_row(NEVER, None, None), UNLEASED, id="without either it counts as unleased"),
        pytest.param(a_row(NEVER, NEVER, NEVER), UNLEASED, id="infinity everywhere is unleased"),
    ],
)
def test_the_stamp_that_decides(job: Job, expected: tuple[object, ...]) -> None:
    assert brief(decide(job, NOBODY_ASKED, DEFAULTS)) == expected


@pytest.mark.parametrize(
    ("policy", "job", "expected"),
    [
        pytest.param(
            Policy(lease_timeout_sec=30), unleased(31.0), REQUEUED_STALE, id="the lease timeout counts"
        ),
        pytest.param(
            Policy(lease_timeout_sec=7200),
            unleased(None, 4000.0),
            LIVE,
            id="also for a start, above the hour",
        ),
        pytest.param(
            DEFAULTS,
            replace(unleased(None, 7000.0), stage="asr", expected_duration_ms=600_000),
            LIVE,
            id="a start also gets the stage's own lease",
        ),
        pytest.param(
            DEFAULTS,
            replace(unleased(None, 7201.0), stage="asr", expected_duration_ms=600_000),
            REQUEUED_STALE,
            id="and no more than that",
        ),
        pytest.param(
            DEFAULTS,
            replace(unleased(301.0), stage="asr", expected_duration_ms=600_000),
            REQUEUED_STALE,
            id="a beat does not",
        ),
        pytest.param(
            DEFAULTS,
            a_row(-2 * 72_000, 80_000, stage="asr", expected_ms=6_000_000),
            LIVE,
            id="twice a long stage's lease is believed",
        ),
        pytest.param(
            DEFAULTS,
            a_row(-2 * 72_000 - 1, 72_001, stage="asr", expected_ms=6_000_000),
            REQUEUED,
            id="beyond it the beat decides, with the stage's lease",
        ),
        pytest.param(
            DEFAULTS,
            a_row(-2 * 72_000 - 1, 71_999, stage="asr", expected_ms=6_000_000),
            LIVE,
            id="which a fresh enough beat has not used up",
        ),
    ],
)
def test_timeouts_and_stages(policy: Policy, job: Job, expected: tuple[object, ...]) -> None:
    assert brief(decide(job, NOBODY_ASKED, policy)) == expected


# ── decisions 1 and 3: requeue or fail ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        pytest.param(a_row(attempt=2), REQUEUED, id="one attempt left"),
        pytest.param(a_row(attempt=3), TIMED_OUT, id="as many attempts as allowed"),
        pytest.param(a_row(attempt=4), TIMED_OUT, id="more attempts than allowed"),
        pytest.param(a_row(attempt=3, refunded=1), REQUEUED, id="a refund gives one back"),
        pytest.param(a_row(attempt=4, refunded=1), TIMED_OUT, id="and only one"),
        pytest.param(a_row(attempt=3, refunded=None), TIMED_OUT, id="no refunds are none"),
        pytest.param(a_row(attempt=None), REQUEUED, id="no attempts are none"),
        pytest.param(a_row(attempt=None, max_attempts=0), TIMED_OUT, id="no attempts of none allowed"),
        pytest.param(
            a_row(attempt=0, max_attempts=0), TIMED_OUT, id="max_attempts of zero is exhausted at once"
        ),
        pytest.param(a_row(attempt=0, refunded=5, max_attempts=0), TIMED_OUT, id="whatever was refunded"),
        pytest.param(a_row(attempt=0, refunded=5, max_attempts=-1), TIMED_OUT, id="and so is a negative one"),
        pytest.param(
            a_row(attempt=2, max_attempts=None), REQUEUED, id="JOB_MAX_ATTEMPTS where the row says nothing"
        ),
        pytest.param(a_row(attempt=3, max_attempts=None), TIMED_OUT, id="which is three"),
        pytest.param(unleased(999.0, attempt=1), REQUEUED_STALE, id="without a lease this run counts too"),
        pytest.param(unleased(999.0, attempt=2), WORN_OUT, id="so two of three are used up"),
        pytest.param(unleased(999.0, attempt=2, refunded=1), REQUEUED_STALE, id="unless one was refunded"),
        pytest.param(unleased(999.0, attempt=None), REQUEUED_STALE, id="no attempts and this one"),
        pytest.param(unleased(999.0, attempt=None, max_attempts=1), WORN_OUT, id="which may be the only one"),
        pytest.param(
            a_row(due_age=-1.0), NOT_DUE, id="a requeue waits while next_earliest_run_at lies ahead"
        ),
        pytest.param(a_row(due_age=0.0), REQUEUED, id="and is due at that moment"),
        pytest.param(a_row(due_age=NEVER), NOT_DUE, id="infinity never comes"),
        pytest.param(a_row(due_age=EVER), REQUEUED, id="-infinity has always been"),
        pytest.param(a_row(due_age=-1.0, attempt=3), TIMED_OUT, id="a fail does not wait"),
        pytest.param(a_row(-5.0, due_age=-1.0), LIVE, id="a live row is not counted as not due"),
    ],
)
def test_requeue_or_fail(job: Job, expected: tuple[object, ...]) -> None:
    assert brief(decide(job, NOBODY_ASKED, DEFAULTS)) == expected


@pytest.mark.parametrize(
    ("job", "rule", "fail_code", "fail_reason"),
    [
        pytest.param(a_row(attempt=3), UNKNOWN_RULE, "timeout", "lease_expired", id="an expired lease"),
        pytest.param(
            a_row(NEVER, 999.0, attempt=3), UNKNOWN_RULE, "timeout", "lease_expired", id="an absurd lease"
        ),
        pytest.param(
            unleased(999.0, attempt=2),
            UNKNOWN_RULE,
            "RETRIES_EXHAUSTED",
            "heartbeat_stale",
            id="a stale beat",
        ),
        pytest.param(
            a_row(-60.0, attempt=3), CONFIRMED, "worker_lost", "pod_dead", id="a dead pod before expiry"
        ),
        pytest.param(
            a_row(60.0, attempt=3), CONFIRMED, "timeout", "lease_expired", id="a dead pod after expiry"
        ),
        pytest.param(
            a_row(999.0, start_age=2000.0, attempt=3),
            ALIVE,
            "timeout",
            "lease_expired",
            id="a hung pod beyond the cap",
        ),
    ],
)
def test_what_a_fail_says(job: Job, rule: Rule, fail_code: str, fail_reason: str) -> None:
    decision = decide(job, judged_by(rule), DEFAULTS)
    assert decision.outcome is Outcome.FAILED
    assert (decision.fail_code, decision.fail_reason) == (fail_code, fail_reason)
    assert decision.attempt_after == job.attempt_count
    assert decision.backoff_sec is None


@pytest.mark.parametrize(
    ("job", "attempt_after", "backoff_sec"),
    [
        pytest.param(a_row(attempt=1), 1, 30, id="the first requeue waits half a minute"),
        pytest.param(a_row(attempt=2), 2, 120, id="the second two minutes"),
        pytest.param(a_row(attempt=3, max_attempts=9), 3, 600, id="the third ten"),
        pytest.param(a_row(attempt=8, max_attempts=9), 8, 600, id="and so on"),
        pytest.param(a_row(attempt=3, refunded=2), 3, 30, id="a refunded attempt does not lengthen the wait"),
        pytest.param(a_row(attempt=0), 0, 30, id="an uncounted claim waits like the first"),
        pytest.param(
            a_row(attempt=1, refunded=7), 1, 30, id="more refunds than attempts wait like the first"
        ),
        pytest.param(a_row(attempt=None), None, 30, id="NULL stays NULL where the claim counts"),
        pytest.param(unleased(999.0, attempt=0), 1, 30, id="without a lease the requeue counts"),
        pytest.param(unleased(999.0, attempt=1), 2, 120, id="and waits for what it counted"),
        pytest.param(unleased(999.0, attempt=None), 1, 30, id="NULL counts from zero"),
        pytest.param(
            unleased(999.0, attempt=INT_MAX, refunded=INT_MAX),
            INT_MAX,
            30,
            id="the counter stops at its ceiling",
        ),
    ],
)
def test_what_a_requeue_sets(job: Job, attempt_after: int | None, backoff_sec: float) -> None:
    decision = decide(job, NOBODY_ASKED, DEFAULTS)
    assert decision.outcome is Outcome.REQUEUED
    assert (decision.attempt_after, decision.backoff_sec) == (attempt_after, backoff_sec)
    assert (decision.fail_code, decision.fail_reason) == (None, None)


def test_a_smaller_counter_column_has_a_lower_ceiling() -> None:
    job = unleased(999.0, attempt=32_767, refunded=32_767)
    assert decide(job, NOBODY_ASKED, DEFAULTS, attempt_ceiling=32_767).attempt_after == 32_767


# ── decision 6 and LIVENESS.md: what a holder's rule changes ────────────────────────────────────────


@pytest.mark.parametrize(
    ("job", "rulebook", "expected"),
    [
        pytest.param(
            a_row(), judged_by(None), NO_RULE, id="a holder nobody asked about is left for the next pass"
        ),
        pytest.param(a_row(attempt=9), judged_by(None), NO_RULE, id="also when its attempts are used up"),
        pytest.param(
            a_row(locked_by=None), judged_by(None), REQUEUED, id="a row without a holder is UNKNOWN"
        ),
        pytest.param(unleased(), judged_by(None), UNLEASED, id="a row without stamps is unleased first"),
        pytest.param(a_row(60), judged_by(ALIVE), DEFERRED, id="a living pod spares an expired job"),
        pytest.param(a_row(300), judged_by(ALIVE), DEFERRED, id="for its own lease once more"),
        pytest.param(a_row(300.1), judged_by(ALIVE), REQUEUED_CAPPED, id="and no longer"),
        pytest.param(
            a_row(300.1, attempt=3),
            judged_by(ALIVE),
            (Outcome.FAILED, Reason.DEFER_CAP, EventType.FAILED_TIMEOUT),
            id="the cap can fail it",
        ),
        pytest.param(
            a_row(-1), judged_by(ALIVE), LIVE, id="a living pod with a running lease is simply live"
        ),
        pytest.param(
            a_row(900.1, 5000.0, 5000.0, stage="asr", expected_ms=100_000),
            judged_by(ALIVE),
            REQUEUED_CAPPED,
            id="a long stage is spared for deferMaxSec only",
        ),
        pytest.param(
            a_row(899.0, 5000.0, 5000.0, stage="asr", expected_ms=100_000),
            judged_by(ALIVE),
            DEFERRED,
            id="but for that long",
        ),
        pytest.param(unleased(600.0), judged_by(ALIVE), DEFERRED, id="mercy counts from the beat's timeout"),
        pytest.param(
            unleased(600.1),
            judged_by(ALIVE),
            (Outcome.REQUEUED, Reason.DEFER_CAP, EventType.REQUEUED_STALE),
            id="and ends there",
        ),
        pytest.param(a_row(60), judged_by(INFERRED), REQUEUED, id="an inferred death acts once expired"),
        pytest.param(a_row(-1), judged_by(INFERRED), LIVE, id="and not before"),
        pytest.param(
            a_row(-60), judged_by(CONFIRMED), REQUEUED_EARLY, id="a confirmed death acts before expiry"
        ),
        pytest.param(
            a_row(-60, attempt=3), judged_by(CONFIRMED), WORKER_LOST, id="and may fail before expiry"
        ),
        pytest.param(
            a_row(-60, due_age=-1), judged_by(CONFIRMED), NOT_DUE, id="but an early requeue waits until due"
        ),
        pytest.param(a_row(60), judged_by(CONFIRMED), REQUEUED, id="after expiry the reason is the lease"),
        pytest.param(unleased(10.0), judged_by(CONFIRMED), REQUEUED_EARLY, id="also without a lease"),
        pytest.param(
            a_row(-60, 60.1),
            judged_by(INFERRED_EARLY),
            REQUEUED_EARLY,
            id="silence long enough confirms inferred death",
        ),
        pytest.param(a_row(-60, 60.0), judged_by(INFERRED_EARLY), LIVE, id="a fresher beat refutes it"),
        pytest.param(
            a_row(-60, NEVER), judged_by(INFERRED_EARLY), LIVE, id="a beat of infinity is no silence"
        ),
        pytest.param(
            a_row(-60, None), judged_by(INFERRED_EARLY), REQUEUED_EARLY, id="no beat at all is silence"
        ),
        pytest.param(
            a_row(60, 10.0), judged_by(INFERRED_EARLY), REQUEUED, id="once expired the beat is no excuse"
        ),
    ],
)
def test_what_a_verdict_allows(job: Job, rulebook: Rulebook, expected: tuple[object, ...]) -> None:
    assert brief(decide(job, rulebook, DEFAULTS)) == expected


NAMED = Rule(Verdict.ALIVE, Mode.CAPPED, claimed_before_age=500.0)
BUSY = Rule(Verdict.ALIVE, Mode.CAPPED, other_beat_age=10.0)


@pytest.mark.parametrize(
    ("job", "rulebook", "expected"),
    [
        pytest.param(
            a_row(60, 90, 600),
            judged_by(NAMED),
            REQUEUED,
            id="claimed before the pod's start: an earlier process",
        ),
        pytest.param(
            a_row(-60, 90, 600),
            judged_by(NAMED),
            LIVE,
            id="whose death is inferred only, so it waits for the expiry",
        ),
        pytest.param(
            a_row(60, 90, 500), judged_by(NAMED), DEFERRED, id="claimed at the pod's start: the living one"
        ),
        pytest.param(
            a_row(60, 90, None), judged_by(NAMED), DEFERRED, id="claimed who knows when: the living one"
        ),
        pytest.param(
            a_row(60, 90, EVER), judged_by(NAMED), REQUEUED, id="claimed at -infinity: an earlier process"
        ),
        pytest.param(
            a_row(-60, 90, 600),
            judged_by(Rule(Verdict.DEAD_CONFIRMED, Mode.NOW, claimed_before_age=500.0)),
            LIVE,
            id="an earlier process is never acted on early",
        ),
        pytest.param(
            a_row(40.1), judged_by(BUSY), REQUEUED_DROPPED, id="who beats other jobs has forgotten this one"
        ),
        pytest.param(
            a_row(40.0), judged_by(BUSY), DEFERRED, id="two beats after the expiry are still chance"
        ),
        pytest.param(a_row(-1.0), judged_by(BUSY), LIVE, id="a running lease is never dropped"),
        pytest.param(
            a_row(40.1, attempt=3),
            judged_by(BUSY),
            (Outcome.FAILED, Reason.DROPPED, EventType.FAILED_TIMEOUT),
            id="a dropped job can fail",
        ),
        pytest.param(
            unleased(341.0),
            judged_by(BUSY),
            (Outcome.REQUEUED, Reason.DROPPED, EventType.REQUEUED_STALE),
            id="without a lease the timeout comes before",
        ),
        pytest.param(
            unleased(None, 3000.0), judged_by(BUSY), LIVE, id="a start within its hour is not dropped"
        ),
        pytest.param(
            a_row(50), judged_by(Rule(other_beat_age=10.0)), REQUEUED, id="only a living holder can forget"
        ),
    ],
)
def test_earlier_processes_and_forgotten_jobs(
    job: Job, rulebook: Rulebook, expected: tuple[object, ...]
) -> None:
    assert brief(decide(job, rulebook, DEFAULTS)) == expected


@pytest.mark.parametrize(
    ("job", "rulebook", "expected"),
    [
        pytest.param(
            a_row(120), judged_by(UNKNOWN_RULE, 120), DEFERRED, id="a silent fleet waits for its grace"
        ),
        pytest.param(a_row(120.1), judged_by(UNKNOWN_RULE, 120), REQUEUED, id="and acts after it"),
        pytest.param(
            a_row(1e9, start_age=None),
            judged_by(UNKNOWN_RULE, math.inf),
            DEFERRED,
            id="just back we touch nothing",
        ),
        pytest.param(
            a_row(EVER, start_age=None), judged_by(UNKNOWN_RULE, math.inf), DEFERRED, id="not even -infinity"
        ),
        pytest.param(a_row(60), judged_by(INFERRED, math.inf), REQUEUED, id="a death verdict is not braked"),
        pytest.param(a_row(-60), judged_by(CONFIRMED, math.inf), REQUEUED_EARLY, id="not even before expiry"),
        pytest.param(a_row(310), judged_by(ALIVE, 320), DEFERRED, id="of mercy and grace the longer counts"),
        pytest.param(a_row(310), judged_by(ALIVE, 10), REQUEUED_CAPPED, id="and not their sum"),
        pytest.param(a_row(50), judged_by(BUSY, 120), DEFERRED, id="a forgotten job is braked too"),
        pytest.param(
            a_row(60, locked_by=None), judged_by(None, 120), DEFERRED, id="so is a row without a holder"
        ),
        pytest.param(
            unleased(420.0),
            judged_by(UNKNOWN_RULE, 120),
            DEFERRED,
            id="without a lease it counts from the timeout",
        ),
        pytest.param(unleased(420.1), judged_by(UNKNOWN_RULE, 120), REQUEUED_STALE, id="and ends there too"),
        pytest.param(a_row(-1), judged_by(UNKNOWN_RULE, 120), LIVE, id="a live row is not deferred"),
        pytest.param(
            a_row(60, attempt=3), judged_by(UNKNOWN_RULE, 120), DEFERRED, id="a fail is braked as well"
        ),
    ],
)
def test_the_silent_fleet_brake(job: Job, rulebook: Rulebook, expected: tuple[object, ...]) -> None:
    assert brief(decide(job, rulebook, DEFAULTS)) == expected


def test_a_holder_without_a_rule_of_its_own_follows_the_default() -> None:
    rulebook = Rulebook({"other": INFERRED}, default=ALIVE)
    assert brief(decide(a_row(60), rulebook, DEFAULTS)) == DEFERRED


# ── what holds for every row ────────────────────────────────────────────────────────────────────────

ages = st.none() | st.sampled_from([NEVER, EVER]) | st.floats(-1e7, 1e7) | st.floats(-4000, 4000)
counts = st.none() | st.integers(-3, 8) | st.sampled_from([INT_MAX, -INT_MAX])
jobs = st.builds(
    Job,
    lease_age=ages,
    beat_age=ages,
    start_age=ages,
    due_age=ages,
    attempt_count=counts,
    attempts_refunded=counts,
    max_attempts=counts,
    stage=st.sampled_from(["clip", "asr", "unknown", None]),
    expected_duration_ms=st.none() | st.integers(-10, 10**9),
    locked_by=st.sampled_from(["w", "x", None]),
)
policies = st.builds(
    Policy,
    sla=st.builds(
        SlaPolicy,
        default_lease_sec=st.integers(1, 10_000),
        factors=st.dictionaries(
            st.sampled_from(["clip", "asr"]), st.decimals(Decimal("0.01"), 100, places=2)
        ),
    ),
    backoff=st.builds(BackoffPolicy, base_ms=st.none() | st.integers(1, 10**6)),
    liveness=st.builds(LivenessPolicy, defer_factor=st.floats(0, 10), defer_max_sec=st.integers(0, 5000)),
    max_attempts=st.integers(0, 5),
    lease_timeout_sec=st.integers(1, 10_000),
    heartbeat_sec=st.integers(1, 60),
)
rules = st.builds(
    Rule,
    verdict=st.sampled_from(Verdict),
    mode=st.sampled_from(Mode),
    claimed_before_age=st.none() | st.floats(-1e4, 1e6),
    other_beat_age=st.none() | st.floats(-1e4, 1e6),
    min_silence_sec=st.none() | st.floats(0, 1e4),
)
rulebooks = st.builds(
    Rulebook,
    holders=st.dictionaries(st.sampled_from(["w", "x"]), rules),
    default=st.none() | rules,
    grace_sec=st.just(0.0) | st.floats(0, 5000) | st.just(math.inf),
)
ACTED = (Outcome.REQUEUED, Outcome.FAILED)


def silent_for(seconds: float, job: Job) -> Job:
    """The same row, seen that much later."""

    def older(age: float | None) -> float | None:
        return None if age is None else age + seconds

    return replace(
        job, lease_age=older(job.lease_age), beat_age=older(job.beat_age), start_age=older(job.start_age)
    )


def lease_of(job: Job, policy: Policy) -> int:
    return stage_lease_sec(policy.sla, job.stage, job.expected_duration_ms)


@given(jobs, rulebooks, policies)
def test_a_row_without_stamps_is_never_touched(job: Job, rulebook: Rulebook, policy: Policy) -> None:
    for nothing in (None, NEVER, -1e9):
        bare = replace(job, lease_age=None, beat_age=nothing, start_age=nothing)
        assert decide(bare, rulebook, policy).outcome is Outcome.UNLEASED


@given(jobs, policies)
def test_unknown_acts_if_and_only_if_expired(job: Job, policy: Policy) -> None:
    stamp = judged_stamp(job, policy, lease_of(job, policy))
    outcome = decide(replace(job, due_age=None), Rulebook(), policy).outcome
    assert (outcome in ACTED) == stamp.expired
    assert (outcome is Outcome.UNLEASED) == (stamp.kind is Kind.NONE)


@given(jobs, rulebooks, policies)
def test_a_holder_without_a_rule_is_never_acted_on(job: Job, rulebook: Rulebook, policy: Policy) -> None:
    unasked = replace(rulebook, holders={}, default=None)
    held = replace(job, locked_by="w")
    assert decide(held, unasked, policy).outcome in (Outcome.NO_RULE, Outcome.UNLEASED)


@given(jobs, rulebooks, policies)
def test_patience_is_bounded_whatever_the_rule(job: Job, rulebook: Rulebook, policy: Policy) -> None:
    """Alive may delay a reap, never veto it for ever; so may the silent-fleet brake."""
    assume(job.locked_by is None or rulebook.holders.get(job.locked_by, rulebook.default) is not None)
    job = silent_for(1e9, job)
    lease_sec = lease_of(job, policy)
    stamp = judged_stamp(job, policy, lease_sec)
    grace_sec = 0.0 if math.isinf(rulebook.grace_sec) else rulebook.grace_sec
    cap = max(mercy_sec(policy.liveness, lease_sec), grace_sec)
    assert stamp.kind is Kind.NONE or stamp.expired_beyond(cap)
    decision = decide(replace(job, due_age=None), replace(rulebook, grace_sec=grace_sec), policy)
    assert decision.outcome in (ACTED if stamp.expired else (Outcome.UNLEASED,))


@given(jobs, rulebooks, policies)
def test_only_a_confirmed_reading_acts_before_expiry(job: Job, rulebook: Rulebook, policy: Policy) -> None:
    stamp = judged_stamp(job, policy, lease_of(job, policy))
    decision = decide(job, rulebook, policy)
    if decision.outcome in ACTED and not stamp.expired:
        assert job.locked_by is not None
        rule = rulebook.holders.get(job.locked_by, rulebook.default)
        assert rule is not None
        assert rule.mode is Mode.NOW
        assert decision.reason is Reason.POD_DEAD


@given(jobs, rulebooks, policies)
def test_a_row_fails_exactly_when_its_attempts_are_used_up(
    job: Job, rulebook: Rulebook, policy: Policy
) -> None:
    decision = decide(job, rulebook, policy)
    assume(decision.outcome in (*ACTED, Outcome.NOT_DUE))
    stamp = judged_stamp(job, policy, lease_of(job, policy))
    used = (job.attempt_count or 0) - (job.attempts_refunded or 0) + stamp.counts_at_requeue
    allowed = policy.max_attempts if job.max_attempts is None else job.max_attempts
    assert (decision.outcome is Outcome.FAILED) == (used >= allowed or allowed <= 0)


@given(jobs, rulebooks, policies)
def test_a_refund_never_fails_a_row_that_would_be_requeued(
    job: Job, rulebook: Rulebook, policy: Policy
) -> None:
    before = decide(job, rulebook, policy).outcome
    refunded = replace(job, attempts_refunded=(job.attempts_refunded or 0) + 1)
    assert before is Outcome.FAILED or decide(refunded, rulebook, policy).outcome is before


@given(jobs, policies, st.floats(0, 1e6))
def test_what_has_expired_stays_expired(job: Job, policy: Policy, later: float) -> None:
    """No job becomes live again by mere waiting: time only ever moves towards the reaper."""
    assume(job.lease_age is None or job.lease_age > 0)

    assume(job.beat_age is None or job.beat_age > -80_000)
    assume(job.start_age is None or job.start_age > -80_000)
    waited = silent_for(later, job)
    lease_sec = lease_of(job, policy)
    if judged_stamp(job, policy, lease_sec).expired:
        assert judged_stamp(waited, policy, lease_sec).expired


@given(jobs, rulebooks, policies)
def test_a_decision_is_whole(job: Job, rulebook: Rulebook, policy: Policy) -> None:
    """What is acted on has a reason and an event; a fail its words, a requeue its delay; the rest nothing."""
    decision = decide(job, rulebook, policy)
    acted, failed = decision.outcome in ACTED, decision.outcome is Outcome.FAILED
    assert (decision.reason is not None) == acted
    assert (decision.event is not None) == acted
    assert (decision.fail_code is not None) == failed
    assert (decision.fail_reason is not None) == failed
    assert (decision.backoff_sec is not None) == (acted and not failed)
    if acted:
        assert (decision.attempt_after or 0) >= (job.attempt_count or 0)
    if decision.event is EventType.REQUEUED_STALE:
        assert decision.reason in (Reason.STALE, Reason.DEFER_CAP, Reason.DROPPED)
