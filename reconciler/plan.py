"""Pure: the brakes. When doubt about ourselves outweighs doubt about the workers, do less, and say so."""

from __future__ import annotations

import math
from collections.abc import Iterable

from reconciler.model import BrakePolicy
from reconciler.report import Fleet

FLEET_SIZE = 5
"""Fewer silent holders than this are bad luck; from here on it is likelier us than all of them."""


def silent_fleet_grace(policy: BrakePolicy, fleets: Iterable[Fleet], resumed_age_sec: float | None) -> float:
    """How long after its expiry a row is left alone because nobody at all is beating.

    0: act as usual. `inf`: not in this pass, because we ourselves were away until just now and beats had no
    time to arrive. Bounded by construction: each row waits at most the grace after its expiry, and the
    whole pass at most the grace after we came back.
    """
    if policy.outage_grace_sec == 0:
        return 0.0
    fleets = tuple(fleets)
    holders = frozenset[str]().union(*(fleet.holders for fleet in fleets))
    if len(holders) < FLEET_SIZE or any(fleet.any_fresh_beat for fleet in fleets):
        return 0.0
    if resumed_age_sec is not None and resumed_age_sec < policy.outage_grace_sec:
        return math.inf
    return float(policy.outage_grace_sec)


def silent_fleet_sentence(grace_sec: float) -> str:
    """The sentence that explains why expired jobs are left alone."""
    if grace_sec == math.inf:
        return (
            "nobody beats, and this reaper was away until just now: expired jobs get brake.outageGraceSec"
            " to be beaten again"
        )
    return f"nobody beats: expired jobs are touched only {grace_sec:g} s after their expiry"


def share_brake(policy: BrakePolicy, expired: int, processing: int) -> str | None:
    """The sentence that explains why a table is left unchanged, or None."""
    if policy.max_expired_share >= 1 or processing == 0:
        return None
    share = expired / processing
    if share <= policy.max_expired_share:
        return None
    return (
        f"{expired} of {processing} processing jobs ({share:.0%}) have expired, more than"
        f" brake.maxExpiredShare={policy.max_expired_share:g} allows: the table is left unchanged. If their"
        " workers are truly gone, raise the share for one pass"
    )
