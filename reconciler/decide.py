"""The row rule, as a pure model: one job and its holder's rule in, one decision out.

Postgres applies this rule (sql/reap.sql), because rows are many and the write must judge each row as it
is at that moment. This is the same rule for people and tests: dry-run texts, `explain`, and the property
test that feeds random rows to both. If the two differ, the test is red and neither is trusted.

Silence alone is not death: a quiet worker may be busy. Silence on a living pod is spared until the
stage's own lease has passed once more; then it counts as hung.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from reconciler.backoff import delay_sec, ladder
from reconciler.model import (
    UNKNOWN_RULE,
    Decision,
    EventType,
    Job,
    Mode,
    Outcome,
    Policy,
    Reason,
    Rule,
    Rulebook,
    Verdict,
)
from reconciler.sla import FAR_AHEAD_SEC, far_ahead_sec, mercy_sec, stage_lease_sec, start_stale_sec

DEAD = frozenset({Verdict.DEAD_CONFIRMED, Verdict.DEAD_INFERRED})

INT_MAX = 2_147_483_647


class Kind(StrEnum):
    """Which stamp of the row is judged."""

    LEASE = "lease"
    FAR = "far"  # the lease is not believable: the last sign of life plus the stage's lease
    BEAT = "beat"  # no lease: the last beat
    START = "start"  # no lease and no beat: the start
    NONE = "none"  # nothing to judge by: never touched


@dataclass(frozen=True, slots=True)
class Judged:
    """The stamp that decides: its age, the age at which it expires, and the age at which we may act."""

    kind: Kind
    age: float = 0.0
    allow_sec: float = 0.0
    need_sec: float = 0.0

    @property
    def expired(self) -> bool:
        return self.kind is not Kind.NONE and self.age > self.need_sec

    def expired_beyond(self, seconds: float) -> bool:
        return self.expired and self.age > self.allow_sec + seconds

    @property
    def counts_at_requeue(self) -> bool:
        """Workers of the older generation do not count at claim, so the reaper does."""
        return self.kind in (Kind.BEAT, Kind.START)


def judged_stamp(job: Job, policy: Policy, lease_sec: int) -> Judged:
    """Choose the stamp (SPEC.md decision 2).

    A beat or a start more than a day ahead says nothing, like 'infinity': a skewed clock is hours off, not
    days, and a job must not stay stuck until the year 3000. A lease that still runs is nobody's past.
    """
    beat, start = _believed(job.beat_age), _believed(job.start_age)
    lease = job.lease_age
    earlier_run = lease is not None and start is not None and lease > max(start, 0)
    if lease is None or earlier_run:
        timeout = policy.lease_timeout_sec
        if beat is not None:
            return Judged(Kind.BEAT, beat, timeout, timeout)
        if start is not None:
            return Judged(Kind.START, start, timeout, start_stale_sec(timeout, lease_sec))
        return Judged(Kind.NONE)
    if lease < -far_ahead_sec(lease_sec):
        sign = beat if beat is not None else start
        return Judged(Kind.NONE) if sign is None else Judged(Kind.FAR, sign, lease_sec, lease_sec)
    return Judged(Kind.LEASE, lease)


def _believed(sign_age: float | None) -> float | None:
    return None if sign_age is None or sign_age < -FAR_AHEAD_SEC else sign_age


def decide(job: Job, rulebook: Rulebook, policy: Policy, *, attempt_ceiling: int = INT_MAX) -> Decision:
    """Judge one job. No clock, no database, no cluster."""
    lease_sec = stage_lease_sec(policy.sla, job.stage, job.expected_duration_ms)
    stamp = judged_stamp(job, policy, lease_sec)
    if stamp.kind is Kind.NONE:
        return Decision(Outcome.UNLEASED)
    rule = _rule_for(job, rulebook)
    if rule is None:
        return Decision(Outcome.NO_RULE)

    dropped = (
        rule.other_beat_age is not None
        and stamp.expired
        and rule.verdict is Verdict.ALIVE
        and stamp.age - stamp.allow_sec > rule.other_beat_age + 2 * policy.heartbeat_sec
    )
    if not _may_act(
        job,
        stamp,
        rule,
        dropped=dropped,
        grace_sec=rulebook.grace_sec,
        mercy=mercy_sec(policy.liveness, lease_sec),
    ):
        return Decision(Outcome.DEFERRED if stamp.expired else Outcome.LIVE)

    reason = _reason(stamp, rule, dropped=dropped)
    counted = (job.attempt_count or 0) + (1 if stamp.counts_at_requeue else 0) - (job.attempts_refunded or 0)
    limit = policy.max_attempts if job.max_attempts is None else job.max_attempts
    if counted >= limit or limit <= 0:
        event, code, why = _failure(stamp)
        return Decision(
            Outcome.FAILED, reason, event, fail_code=code, fail_reason=why, attempt_after=job.attempt_count
        )
    if job.due_age is not None and job.due_age < 0:
        return Decision(Outcome.NOT_DUE)
    attempt = job.attempt_count
    if stamp.counts_at_requeue:
        attempt = min((attempt or 0) + 1, attempt_ceiling)
    return Decision(
        Outcome.REQUEUED,
        reason,
        EventType.REQUEUED_STALE if stamp.counts_at_requeue and stamp.expired else EventType.REQUEUED,
        attempt_after=attempt,
        backoff_sec=delay_sec(ladder(policy.backoff), counted),
    )


def _rule_for(job: Job, rulebook: Rulebook) -> Rule | None:
    if job.locked_by is None:
        return UNKNOWN_RULE
    rule = rulebook.holders.get(job.locked_by, rulebook.default)
    if (
        rule is not None
        and rule.claimed_before_age is not None
        and job.start_age is not None
        and job.start_age > rule.claimed_before_age
    ):
        # An earlier process of the same name claimed this row: only the name is alive.
        return Rule(verdict=Verdict.DEAD_INFERRED, mode=Mode.EXPIRED, pod=rule.pod)
    return rule


def _may_act(job: Job, stamp: Judged, rule: Rule, *, dropped: bool, grace_sec: float, mercy: float) -> bool:
    if rule.mode is Mode.NOW and _silent(job, rule):
        return True
    if not stamp.expired:
        return False
    patience = 0.0
    if rule.mode is Mode.CAPPED and not dropped:
        patience = mercy
    if rule.verdict not in DEAD:
        patience = max(patience, grace_sec)
    return patience == 0 or stamp.expired_beyond(patience)


def _silent(job: Job, rule: Rule) -> bool:
    return rule.min_silence_sec is None or job.beat_age is None or job.beat_age > rule.min_silence_sec


def _reason(stamp: Judged, rule: Rule, *, dropped: bool) -> Reason:
    if not stamp.expired:
        return Reason.POD_DEAD
    if dropped:
        return Reason.DROPPED
    if rule.mode is Mode.CAPPED:
        return Reason.DEFER_CAP
    return Reason.STALE if stamp.counts_at_requeue else Reason.LEASE_EXPIRED


def _failure(stamp: Judged) -> tuple[EventType, str, str]:
    if not stamp.expired:
        return EventType.FAILED_WORKER_LOST, "worker_lost", Reason.POD_DEAD
    if stamp.counts_at_requeue:
        return EventType.FAILED_RETRIES_EXHAUSTED, "RETRIES_EXHAUSTED", "heartbeat_stale"
    return EventType.FAILED_TIMEOUT, "timeout", Reason.LEASE_EXPIRED
