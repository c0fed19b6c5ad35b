"""The values that travel through the house: frozen, without behaviour beyond what they say themselves.

Nothing here imports anything but the standard library. Words that become a metric label, an event
word or a JSON key are enums, so that each is spelt once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Any

# ── What the operator configured ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Columns:
    """The app's names for the columns we read and write."""

    id: str = "id"
    status: str = "status"
    locked_by: str = "locked_by"
    lease_expires_at: str = "lease_expires_at"
    last_heartbeat_at: str = "last_heartbeat_at"
    processing_started_at: str = "processing_started_at"
    attempt_count: str = "attempt_count"
    attempts_refunded: str = "attempts_refunded"
    max_attempts: str = "max_attempts"
    fail_code: str = "fail_code"
    fail_reason: str = "fail_reason"
    stage: str = "stage"
    next_earliest_run_at: str = "next_earliest_run_at"
    expected_duration_ms: str = "expected_duration_ms"


@dataclass(frozen=True, slots=True)
class Statuses:
    """The app's words for the four states we know."""

    queued: str = "queued"
    processing: str = "processing"
    done: str = "done"
    failed: str = "failed"


@dataclass(frozen=True, slots=True)
class EventsSpec:
    """Where this table's events are written."""

    table: str = "job_events"
    schema: str | None = None
    job_id: str = "job_id"
    data: str = "data"


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One job table. `name` is the word used in events, metrics and JSON; the rest is where it lives."""

    name: str
    table: str
    schema: str | None = None
    columns: Columns = field(default_factory=Columns)
    statuses: Statuses = field(default_factory=Statuses)
    events: EventsSpec = field(default_factory=EventsSpec)
    max_per_pass: int | None = None


@dataclass(frozen=True, slots=True)
class SlaPolicy:
    """How long a stage may hold a job without a beat."""

    default_lease_sec: int = 300
    factors: Mapping[str, Decimal] = field(
        default_factory=lambda: MappingProxyType(
            {"clip": Decimal(6), "asr": Decimal(12), "burnin": Decimal(8)}
        )
    )


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """Either a fixed ladder of seconds, or base x 2^(n-1) capped at max when both are set."""

    steps_sec: tuple[float, ...] = (30.0, 120.0, 600.0)
    base_ms: int | None = None
    max_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """How far a living pod may delay a reap."""

    defer_factor: float = 1.0
    defer_max_sec: int = 900
    clock_skew_sec: int = 120
    max_holders: int = 2000


@dataclass(frozen=True, slots=True)
class BrakePolicy:
    """When doubt about ourselves outweighs doubt about the workers."""

    max_expired_share: float = 1.0
    outage_grace_sec: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """All numbers the rules need. Seconds and counts only: the core has no clock."""

    sla: SlaPolicy = field(default_factory=SlaPolicy)
    backoff: BackoffPolicy = field(default_factory=BackoffPolicy)
    liveness: LivenessPolicy = field(default_factory=LivenessPolicy)
    brake: BrakePolicy = field(default_factory=BrakePolicy)
    max_attempts: int = 3
    lease_timeout_sec: int = 300
    heartbeat_sec: int = 15
    interval_sec: float = 60.0
    batch_size: int = 5000


# ── What is judged ──────────────────────────────────────────────────────────────────────────────────


class Verdict(StrEnum):
    """What is known about the process that holds a job."""

    DEAD_CONFIRMED = "DEAD_CONFIRMED"
    DEAD_INFERRED = "DEAD_INFERRED"
    ALIVE = "ALIVE"
    DROPPED = "DROPPED"
    UNKNOWN = "UNKNOWN"


class Mode(StrEnum):
    """What a holder's verdict allows SQL to do with its rows."""

    NOW = "now"  # act even before expiry: the process is known to have ended
    EXPIRED = "expired"  # act once expired: the lease alone decides
    CAPPED = "capped"  # act once expired beyond the cap: a living pod delays, never vetoes


class Reason(StrEnum):
    """Why a row was changed (event details, metric label)."""

    LEASE_EXPIRED = "lease_expired"
    STALE = "stale"
    POD_DEAD = "pod_dead"
    DROPPED = "dropped"
    DEFER_CAP = "defer_cap"


class Outcome(StrEnum):
    """What the pass did, or decided not to do, with one row."""

    REQUEUED = "requeued"
    FAILED = "failed"
    DEFERRED = "deferred"  # expired, but spared as ALIVE or by a brake
    NOT_DUE = "not_due"  # expired, but next_earliest_run_at lies ahead
    UNLEASED = "unleased"  # processing without any usable stamp: never touched
    NO_RULE = "no_rule"  # its holder was not judged in this pass: left for the next
    LIVE = "live"  # not expired


class EventType(StrEnum):
    """The word in `job_events.data.type`."""

    REQUEUED = "reaper:requeued"
    REQUEUED_STALE = "requeued:stale"
    FAILED_TIMEOUT = "reaper:failed(timeout)"
    FAILED_WORKER_LOST = "reaper:failed(worker_lost)"
    FAILED_RETRIES_EXHAUSTED = "reaper:failed(retries_exhausted)"


@dataclass(frozen=True, slots=True)
class Rule:
    """One holder's verdict, as SQL can use it.

    `claimed_before_age` serves identities without uid or boot stamp: rows claimed longer ago than this
    belong to an earlier process of that name, which is DEAD_INFERRED; later ones follow `mode`.
    `other_beat_age` is how long ago the same identity last beat any job of this table: it unmasks jobs
    that a living worker has forgotten (DROPPED). `min_silence_sec` is how long a row must not have been
    beaten before it may be taken early: a fresher beat refutes inferred death. Ages are seconds before
    the evidence was taken, measured by Postgres.
    """

    verdict: Verdict = Verdict.UNKNOWN
    mode: Mode = Mode.EXPIRED
    claimed_before_age: float | None = None
    other_beat_age: float | None = None
    min_silence_sec: float | None = None
    pod: Mapping[str, Any] | None = None


UNKNOWN_RULE = Rule()
"""No evidence: the lease alone decides, nothing is shortened or extended."""


@dataclass(frozen=True, slots=True)
class Rulebook:
    """What one pass knows about all holders of one table.

    A holder that is not in `holders` follows `default`; where that is None its rows are left for the
    next pass: a miss must never read as permission. `grace_sec` is the silent-fleet brake: unless a
    verdict says dead, a row is touched only this long after its expiry (`inf`: not in this pass).
    """

    holders: Mapping[str, Rule] = field(default_factory=lambda: MappingProxyType({}))
    default: Rule | None = UNKNOWN_RULE
    grace_sec: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """A row of a job table as the rules see it: ages in seconds before Postgres' now().

    A negative age lies in the future; None is SQL's NULL; `inf` is '-infinity' (older than anything)
    and `-inf` is 'infinity' (never comes).
    """

    lease_age: float | None = None
    beat_age: float | None = None
    start_age: float | None = None
    due_age: float | None = None
    attempt_count: int | None = 1
    attempts_refunded: int | None = 0
    max_attempts: int | None = None
    stage: str | None = None
    expected_duration_ms: int | None = None
    locked_by: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What the row rule says about one job, before anything is written."""

    outcome: Outcome
    reason: Reason | None = None
    event: EventType | None = None
    fail_code: str | None = None
    fail_reason: str | None = None
    attempt_after: int | None = None
    backoff_sec: float | None = None
