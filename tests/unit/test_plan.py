"""The brakes: off by default, bounded when on, and they say why."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.model import BrakePolicy
from reconciler.plan import FLEET_SIZE, share_brake, silent_fleet_grace
from reconciler.report import Fleet

GRACE = BrakePolicy(outage_grace_sec=120)


def a_fleet(*holders: str, fresh: bool = False) -> Fleet:
    return Fleet(frozenset(holders), fresh)


FIVE = a_fleet("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("policy", "fleets", "resumed_age", "grace"),
    [
        pytest.param(BrakePolicy(), [FIVE], 0.0, 0.0, id="off by default"),
        pytest.param(GRACE, [FIVE], None, 120.0, id="five silent holders are a fleet"),
        pytest.param(GRACE, [a_fleet("a", "b", "c", "d")], 0.0, 0.0, id="four silent holders are bad luck"),
        pytest.param(GRACE, [], None, 0.0, id="no table, no fleet"),
        pytest.param(
            GRACE, [a_fleet("a", "b", "c"), a_fleet("d", "e")], None, 120.0, id="holders of all tables count"
        ),
        pytest.param(
            GRACE, [a_fleet("a", "b", "c"), a_fleet("a", "b", "c")], None, 0.0, id="each holder counts once"
        ),
        pytest.param(
            GRACE, [FIVE, a_fleet("f", fresh=True)], 0.0, 0.0, id="one fresh beat in any table refutes it"
        ),
        pytest.param(GRACE, [FIVE], 0.0, math.inf, id="just back from a gap we touch nothing"),
        pytest.param(GRACE, [FIVE], 119.9, math.inf, id="until the grace after our return has passed"),
        pytest.param(GRACE, [FIVE], 120.0, 120.0, id="then each row waits for its own grace only"),
        pytest.param(GRACE, [FIVE], 1e9, 120.0, id="an old return no longer matters"),
    ],
)
def test_the_silent_fleet(
    policy: BrakePolicy, fleets: list[Fleet], resumed_age: float | None, grace: float
) -> None:
    assert silent_fleet_grace(policy, fleets, resumed_age) == grace


def test_the_fleets_may_come_as_a_stream() -> None:
    assert silent_fleet_grace(GRACE, iter([FIVE]), None) == 120.0
    assert silent_fleet_grace(GRACE, iter([FIVE, a_fleet("f", fresh=True)]), None) == 0.0


fleets_ = st.lists(
    st.builds(Fleet, st.frozensets(st.sampled_from("abcdefgh"), max_size=6), st.booleans()), max_size=4
)


@given(st.integers(0, 10**6), fleets_, st.none() | st.floats(0, 1e9))
def test_the_grace_is_bounded(grace_sec: int, fleets: list[Fleet], resumed_age: float | None) -> None:
    grace = silent_fleet_grace(BrakePolicy(outage_grace_sec=grace_sec), fleets, resumed_age)
    if math.isinf(grace):  # only for as long as the grace after our own return
        assert resumed_age is not None
        assert resumed_age < grace_sec
    else:
        assert grace in (0.0, grace_sec)
    if any(fleet.any_fresh_beat for fleet in fleets):
        assert grace == 0
    if len({holder for fleet in fleets for holder in fleet.holders}) < FLEET_SIZE:
        assert grace == 0


@pytest.mark.parametrize(
    ("share", "expired", "processing", "braked"),
    [
        pytest.param(1.0, 10, 10, False, id="off by default, even when all expired"),
        pytest.param(0.5, 5, 10, False, id="exactly the share may act"),
        pytest.param(0.5, 6, 10, True, id="more than the share may not"),
        pytest.param(0.5, 6, 10, True, id="all three scans count"),
        pytest.param(0.5, 0, 0, False, id="an empty table has no share"),
        pytest.param(0.0, 1, 100, True, id="a share of zero lets nothing through"),
        pytest.param(0.0, 0, 100, False, id="and has nothing to say when nothing expired"),
        pytest.param(0.5, 12, 10, True, id="rows may come between two counts"),
    ],
)
def test_the_share_brake(share: float, expired: int, processing: int, braked: bool) -> None:
    assert (share_brake(BrakePolicy(max_expired_share=share), expired, processing) is not None) == braked


def test_the_share_brake_tells_its_numbers_and_what_to_do() -> None:
    sentence = share_brake(BrakePolicy(max_expired_share=0.25), 30, 40)
    assert sentence is not None
    for part in ("30 of 40", "75%", "brake.maxExpiredShare=0.25", "raise the share"):
        assert part in sentence
