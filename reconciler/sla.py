"""How long a stage may hold a job: pure arithmetic, exact, and the same in SQL.

The worker sets and extends its lease by this number, and the reaper measures its mercy with it, so the
two must agree to the second. Floats do not (100 * 1.1 is a hair over 110 and would round up), hence
Decimal here and numeric in SQL.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal

from reconciler.model import LivenessPolicy, SlaPolicy

MAX_LEASE_SEC = 315_360_000
"""Ten years. A bigint duration can be absurd; an interval that overflows would poison its row."""

UNSTAMPED_START_SEC = 3600
"""A worker that never beat gets at least an hour from its start (SPEC.md decision 2)."""

FAR_AHEAD_SEC = 86_400
"""A lease further ahead than this (or twice the stage's own) was not set by an honest worker."""


def stage_lease_sec(policy: SlaPolicy, stage: str | None, expected_duration_ms: int | None) -> int:
    """The lease a job of this stage gets; the default where stage or duration say nothing."""
    factor = policy.factors.get(stage) if stage is not None else None
    if factor is None or expected_duration_ms is None:
        return min(policy.default_lease_sec, MAX_LEASE_SEC)
    needed = (Decimal(expected_duration_ms) * factor * Decimal("0.001")).to_integral_value(ROUND_CEILING)
    return int(min(max(Decimal(policy.default_lease_sec), needed), Decimal(MAX_LEASE_SEC)))


def far_ahead_sec(lease_sec: int) -> int:
    """Beyond this many seconds from now a lease is not believed."""
    return max(2 * lease_sec, FAR_AHEAD_SEC)


def start_stale_sec(lease_timeout_sec: int, lease_sec: int) -> int:
    """How old a start without any beat must be before the row counts as stale."""
    return max(UNSTAMPED_START_SEC, lease_timeout_sec, lease_sec)


def mercy_sec(policy: LivenessPolicy, lease_sec: int) -> float:
    """How long after its expiry a job is spared because its pod still runs."""
    return min(lease_sec * policy.defer_factor, float(policy.defer_max_sec))
