"""Fast settings, in a module of their own: a worker process must not load pytest to start."""

from __future__ import annotations

from typing import Any

from reconciler.model import BackoffPolicy, Policy, SlaPolicy
from reconciler.worker import Sdk


def a_fast_sdk(*, lease_sec: int = 3, beat_sec: int = 1, backoff_sec: float = 0.05, **options: Any) -> Sdk:
    """Leases of seconds and delays of milliseconds."""
    policy = Policy(
        sla=SlaPolicy(default_lease_sec=lease_sec),
        backoff=BackoffPolicy(steps_sec=(backoff_sec,)),
        heartbeat_sec=beat_sec,
        lease_timeout_sec=lease_sec,
    )
    return Sdk(policy, **options)
