"""Stage leases: exact, never shorter than the default, the same for worker and reaper."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reconciler.model import LivenessPolicy, SlaPolicy
from reconciler.sla import (
    MAX_LEASE_SEC,
    far_ahead_sec,
    mercy_sec,
    stage_lease_sec,
    start_stale_sec,
)

DOCUMENTS = SlaPolicy()

factors = st.decimals(Decimal("0.000001"), 10_000, places=6)
durations = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 10**8)
leases = st.integers(1, 10**6)


@pytest.mark.parametrize(
    ("stage", "expected_ms", "lease_sec"),
    [
        pytest.param("clip", 60_000, 360, id="clip gets six times its duration"),
        pytest.param("asr", 60_000, 720, id="asr gets twelve times its duration"),
        pytest.param("burnin", 60_000, 480, id="burnin gets eight times its duration"),
        pytest.param("clip", 50_000, 300, id="exactly the default stays the default"),
        pytest.param("clip", 50_001, 301, id="a fraction of a second rounds up"),
        pytest.param("clip", 1, 300, id="a short job gets the default"),
        pytest.param("clip", 0, 300, id="no duration at all gets the default"),
        pytest.param("clip", -60_000, 300, id="a negative duration gets the default"),
        pytest.param("clip", None, 300, id="an unknown duration gets the default"),
        pytest.param("dub", 10**7, 300, id="an unknown stage gets the default"),
        pytest.param("Clip", 10**7, 300, id="a stage is spelt exactly"),
        pytest.param("", 10**7, 300, id="an empty stage is unknown"),
        pytest.param(None, 10**7, 300, id="no stage gets the default"),
        pytest.param("asr", 2**63 - 1, MAX_LEASE_SEC, id="an absurd duration gets ten years"),
    ],
)
def test_the_documents_factors(stage: str | None, expected_ms: int | None, lease_sec: int) -> None:
    assert stage_lease_sec(DOCUMENTS, stage, expected_ms) == lease_sec


def test_a_factor_that_floats_cannot_hold_does_not_cost_a_second() -> None:
    assert math.ceil(100_000 / 1000 * 1.1) == 111  # what floats say
    assert stage_lease_sec(SlaPolicy(1, {"clip": Decimal("1.1")}), "clip", 100_000) == 110


def test_an_absurd_default_is_cut_to_ten_years_with_and_without_a_stage() -> None:
    policy = SlaPolicy(2 * MAX_LEASE_SEC)
    assert stage_lease_sec(policy, None, None) == MAX_LEASE_SEC
    assert stage_lease_sec(policy, "clip", 1) == MAX_LEASE_SEC


@given(leases, factors, durations)
@example(1, Decimal("0.000001"), 1_000_000_000)
def test_a_lease_is_the_exact_ceiling_within_its_bounds(default: int, factor: Decimal, ms: int) -> None:
    exact = math.ceil(Fraction(factor) * ms / 1000)
    lease_sec = stage_lease_sec(SlaPolicy(default, {"s": factor}), "s", ms)
    assert lease_sec == min(max(default, exact), MAX_LEASE_SEC)


@given(leases, factors, durations, st.sampled_from(["s", "t", None]))
def test_a_lease_is_never_below_the_default(
    default: int, factor: Decimal, ms: int, stage: str | None
) -> None:
    assert stage_lease_sec(SlaPolicy(default, {"s": factor}), stage, ms) >= default


@given(leases, factors, durations, durations)
def test_a_longer_job_never_gets_a_shorter_lease(default: int, factor: Decimal, one: int, two: int) -> None:
    policy = SlaPolicy(default, {"s": factor})
    shorter, longer = sorted((one, two))
    assert stage_lease_sec(policy, "s", shorter) <= stage_lease_sec(policy, "s", longer)


@pytest.mark.parametrize(
    ("lease_sec", "limit"),
    [
        pytest.param(300, 86_400, id="a day for short leases"),
        pytest.param(43_200, 86_400, id="a day for half a day"),
        pytest.param(43_201, 86_402, id="twice the lease beyond half a day"),
    ],
)
def test_a_lease_is_believed_up_to(lease_sec: int, limit: int) -> None:
    assert far_ahead_sec(lease_sec) == limit


@given(st.integers(1, MAX_LEASE_SEC))
def test_a_lease_an_honest_worker_sets_is_always_believed(lease_sec: int) -> None:
    assert far_ahead_sec(lease_sec) > lease_sec


@pytest.mark.parametrize(
    ("timeout", "lease_sec", "stale_sec"),
    [
        pytest.param(300, 300, 3600, id="an hour at least"),
        pytest.param(7200, 300, 7200, id="the lease timeout if that is longer"),
        pytest.param(300, 9000, 9000, id="the stage's lease if that is longer"),
    ],
)
def test_a_start_without_a_beat_is_stale_after(timeout: int, lease_sec: int, stale_sec: int) -> None:
    assert start_stale_sec(timeout, lease_sec) == stale_sec


@pytest.mark.parametrize(
    ("policy", "lease_sec", "mercy"),
    [
        pytest.param(LivenessPolicy(), 300, 300, id="the stage's own lease once more"),
        pytest.param(LivenessPolicy(), 43_200, 900, id="a long stage gets deferMaxSec"),
        pytest.param(LivenessPolicy(defer_factor=0), 300, 0, id="a factor of zero shows no mercy"),
        pytest.param(LivenessPolicy(defer_max_sec=0), 300, 0, id="a cap of zero shows no mercy"),
        pytest.param(LivenessPolicy(defer_factor=0.5), 300, 150, id="half the lease"),
    ],
)
def test_mercy_for_a_living_pod(policy: LivenessPolicy, lease_sec: int, mercy: float) -> None:
    assert mercy_sec(policy, lease_sec) == mercy


@given(st.floats(0, 100), st.integers(0, 10**6), st.integers(1, MAX_LEASE_SEC))
def test_mercy_is_bounded_by_its_cap_and_never_negative(factor: float, cap: int, lease_sec: int) -> None:
    assert 0 <= mercy_sec(LivenessPolicy(defer_factor=factor, defer_max_sec=cap), lease_sec) <= cap
