"""Retry delays: the documents' ladder, the doubling shape, never an empty one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.backoff import JITTER, delay_sec, ladder
from reconciler.model import BackoffPolicy
from reconciler.sla import MAX_LEASE_SEC

milliseconds = st.integers(0, 10**12)
doublings = st.builds(BackoffPolicy, base_ms=milliseconds, max_ms=milliseconds | st.none()) | st.builds(
    BackoffPolicy, base_ms=st.none(), max_ms=milliseconds
)
steps = st.lists(st.floats(0, 1e12), min_size=1, max_size=20).map(tuple)
policies = doublings | st.builds(BackoffPolicy, steps_sec=steps)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param(BackoffPolicy(), (30, 120, 600), id="half a minute, two and ten minutes"),
        pytest.param(BackoffPolicy(steps_sec=(5.0,)), (5,), id="one step is a ladder"),
        pytest.param(
            BackoffPolicy(base_ms=30_000),
            (30, 60, 120, 240, 480, 600),
            id="a base alone doubles up to ten minutes",
        ),
        pytest.param(BackoffPolicy(max_ms=100_000), (30, 60, 100), id="a cap alone starts at half a minute"),
        pytest.param(BackoffPolicy(base_ms=1000, max_ms=4000), (1, 2, 4), id="the cap is reached exactly"),
        pytest.param(BackoffPolicy(base_ms=1500, max_ms=4000), (1.5, 3, 4), id="the cap cuts the last step"),
        pytest.param(BackoffPolicy(base_ms=4000, max_ms=4000), (4,), id="base and cap alike are one step"),
        pytest.param(BackoffPolicy(base_ms=9000, max_ms=4000), (4,), id="a base above the cap is the cap"),
        pytest.param(BackoffPolicy(base_ms=0, max_ms=4000), (0,), id="a base of zero never waits"),
        pytest.param(BackoffPolicy(base_ms=5, max_ms=0), (0,), id="a cap of zero never waits"),
        pytest.param(BackoffPolicy(steps_sec=(1e18,)), (MAX_LEASE_SEC,), id="no step is beyond ten years"),
    ],
)
def test_the_ladder(policy: BackoffPolicy, expected: tuple[float, ...]) -> None:
    assert ladder(policy) == expected


@pytest.mark.parametrize(
    ("attempts", "delay"),
    [(-2, 30), (0, 30), (1, 30), (2, 120), (3, 600), (4, 600), (2**31, 600)],
    ids=[
        "more refunds than attempts wait the first step",
        "no counted attempt waits the first step",
        "the first attempt waits the first step",
        "the second attempt waits the second step",
        "the third attempt waits the last step",
        "beyond the ladder the last step repeats",
        "and repeats for ever",
    ],
)
def test_the_documents_delays(attempts: int, delay: float) -> None:
    assert delay_sec(ladder(BackoffPolicy()), attempts) == delay


@given(policies)
def test_a_ladder_is_never_empty_and_never_negative(policy: BackoffPolicy) -> None:
    made = ladder(policy)
    assert made
    assert all(0 <= step <= MAX_LEASE_SEC for step in made)


@given(doublings)
def test_a_doubling_ladder_rises_to_its_cap(policy: BackoffPolicy) -> None:
    made = ladder(policy)
    cap = min(600_000 if policy.max_ms is None else policy.max_ms, MAX_LEASE_SEC * 1000) / 1000
    assert all(low < high <= 2 * low for low, high in pairwise(made))
    assert made[-1] == cap or made == (0,)


@given(doublings, st.integers(1, 60))
def test_the_nth_delay_is_the_base_doubled_n_minus_one_times(policy: BackoffPolicy, n: int) -> None:
    base_ms = 30_000 if policy.base_ms is None else policy.base_ms
    max_ms = 600_000 if policy.max_ms is None else policy.max_ms
    exact_ms = min(base_ms * 2 ** (n - 1), max_ms, MAX_LEASE_SEC * 1000)
    assert delay_sec(ladder(policy), n) == exact_ms / 1000


@given(policies, st.integers(0, 1000))
def test_beyond_the_ladder_the_last_step_repeats(policy: BackoffPolicy, beyond: int) -> None:
    made = ladder(policy)
    assert delay_sec(made, len(made) + beyond) == made[-1]


@given(policies, st.integers(-1000, 1))
def test_fewer_than_one_attempt_counts_as_one(policy: BackoffPolicy, n: int) -> None:
    assert delay_sec(ladder(policy), n) == ladder(policy)[0]


def test_jitter_only_ever_adds() -> None:
    assert JITTER == 0.10
