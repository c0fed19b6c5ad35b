"""Retry delays as a ladder: the n-th attempt waits the n-th step, the last step repeats.

Both shapes (the documents' 30 s, 2 min, 10 min and base x 2^(n-1) up to a cap) become one list here, so
that SQL only ever picks `ladder[least(n, length)]` and adds its jitter.
"""

from __future__ import annotations

from reconciler.model import BackoffPolicy
from reconciler.sla import MAX_LEASE_SEC

DEFAULT_BASE_MS = 30_000
DEFAULT_MAX_MS = 600_000

JITTER = 0.10
"""Additive only: a retry is never earlier than asked, and a mass requeue does not come back as one herd."""


def ladder(policy: BackoffPolicy) -> tuple[float, ...]:
    """All distinct delays in seconds, in order; never empty, never decreasing for the doubling shape."""
    if policy.base_ms is None and policy.max_ms is None:
        return tuple(min(float(step), float(MAX_LEASE_SEC)) for step in policy.steps_sec)
    base_ms = DEFAULT_BASE_MS if policy.base_ms is None else policy.base_ms
    max_ms = DEFAULT_MAX_MS if policy.max_ms is None else policy.max_ms
    cap_ms = min(max_ms, MAX_LEASE_SEC * 1000)
    steps = [min(base_ms, cap_ms)]
    while 0 < steps[-1] < cap_ms:
        steps.append(min(steps[-1] * 2, cap_ms))
    return tuple(step / 1000 for step in steps)


def delay_sec(steps: tuple[float, ...], counted_attempts: int) -> float:
    """The delay before jitter, for the number of attempts counted after the requeue."""
    n = max(1, counted_attempts)
    return steps[min(n, len(steps)) - 1]
