"""The keeper's two clocks, and the pace of the beats: no database, real threads."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest

from reconciler.worker import Claim, JobTimeoutError, LeaseLostError, Sdk
from reconciler.worker.beater import Beater
from reconciler.worker.context import JobContext
from reconciler.worker.ending import Action, decide_ending
from reconciler.worker.errors import WorkerStoppingError
from reconciler.worker.keeper import Keeper, margin_sec
from reconciler.worker.retry import RetryDecision, classify


def a_claim(lease_sec: float = 300.0, job_id: int = 1, *, by_stage: bool = True) -> Claim:
    return Claim("jobs", job_id, "w", 1, None, lease_sec, by_stage)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    keeper.start()
    yield keeper
    keeper.stop()


@pytest.mark.parametrize("lease", [0.2, 1, 3, 45, 300, 3600, 43200])
def test_a_worker_gives_up_before_its_lease_ends_but_not_long_before(lease: float) -> None:
    assert 0 < margin_sec(lease) <= max(lease / 4, 0.1 * lease)
    assert margin_sec(lease) <= 30


def test_a_job_without_a_confirmed_beat_is_fenced_before_its_lease_ends(keeper: Keeper) -> None:
    reasons: queue.Queue[BaseException] = queue.Queue()
    sent = time.monotonic()
    keeper.hold(a_claim(0.4), sent_at=sent, budget_sec=None, cancel=reasons.put)
    assert isinstance(reasons.get(timeout=5), LeaseLostError)
    assert time.monotonic() - sent < 0.4
    assert keeper.claims() == []


def test_a_confirmed_beat_counts_from_when_it_was_sent(keeper: Keeper) -> None:
    reasons: queue.Queue[BaseException] = queue.Queue()
    claim = a_claim(0.4)
    start = time.monotonic()
    keeper.hold(claim, sent_at=start, budget_sec=None, cancel=reasons.put)
    keeper.renewed(a_claim(0.8), start + 0.1)
    assert isinstance(reasons.get(timeout=5), LeaseLostError)
    assert 0.6 <= time.monotonic() - start < 0.9


def test_a_beat_sent_before_a_change_of_stage_does_not_bring_the_old_lease_back(keeper: Keeper) -> None:
    now = time.monotonic()
    keeper.hold(a_claim(1000), sent_at=now, budget_sec=None, cancel=lambda _: None)
    keeper.staged(a_claim(10), now + 2)
    keeper.renewed(a_claim(1000), now + 1)
    assert keeper.sec_to_fence(a_claim()) < 15


def test_a_job_past_its_budget_is_cancelled_and_no_longer_beaten(keeper: Keeper) -> None:
    reasons: queue.Queue[BaseException] = queue.Queue()
    keeper.hold(a_claim(), sent_at=time.monotonic(), budget_sec=0.05, cancel=reasons.put)
    assert isinstance(reasons.get(timeout=5), JobTimeoutError)
    assert keeper.claims() == []


def test_an_ending_job_is_beaten_but_not_cancelled(keeper: Keeper) -> None:
    reasons: queue.Queue[BaseException] = queue.Queue()
    claim = a_claim()
    keeper.hold(claim, sent_at=time.monotonic(), budget_sec=None, cancel=reasons.put)
    keeper.ending(claim)
    keeper.lost(claim, claim.lost(), "fenced")
    assert reasons.empty()
    assert keeper.claims() == [claim]
    keeper.drop(claim)
    assert keeper.claims() == []


def test_unread_good_news_is_heard_before_a_job_is_fenced() -> None:
    reasons: queue.Queue[BaseException] = queue.Queue()
    heard: list[float] = []

    def catch_up() -> None:
        heard.append(time.monotonic())
        if len(heard) == 1:
            own.renewed(a_claim(0.5), time.monotonic())

    own = Keeper(catch_up=catch_up)
    own.start()
    own.hold(a_claim(0.3), sent_at=time.monotonic(), budget_sec=None, cancel=reasons.put)
    reasons.get(timeout=5)
    assert len(heard) == 2
    own.stop()


def test_the_pace_is_heartbeat_sec_and_at_least_three_beats_per_lease(keeper: Keeper) -> None:
    beater = Beater("", keeper, Sdk())
    assert beater.interval_sec() == 15
    keeper.hold(a_claim(300), sent_at=time.monotonic(), budget_sec=None, cancel=lambda _: None)
    assert beater.interval_sec() == 15
    keeper.hold(a_claim(9, 2), sent_at=time.monotonic(), budget_sec=None, cancel=lambda _: None)
    assert beater.interval_sec() == 3


# ── what becomes of a run that has stopped ──────────────────────────────────────────────────────────

LOST = LeaseLostError("jobs", 1, "w", 1)


@pytest.mark.parametrize(
    ("told", "raised", "release", "action", "code"),
    [
        (None, None, False, Action.DONE, None),
        (None, ValueError("x"), False, Action.FAIL, "HANDLER_ValueError"),
        (None, ConnectionError(), False, Action.RETRY, "NETWORK"),
        (None, JobTimeoutError(), False, Action.FAIL, "JOB_TIMEOUT"),
        (None, LOST, False, Action.END_LEASE, "lease_lost"),
        (LOST, None, False, Action.END_LEASE, "lease_lost"),
        (LOST, ValueError(), False, Action.END_LEASE, "lease_lost"),
        (JobTimeoutError(), None, False, Action.FAIL, "JOB_TIMEOUT"),
        (JobTimeoutError(), ConnectionError(), False, Action.FAIL, "JOB_TIMEOUT"),
        (WorkerStoppingError(), None, False, Action.END_LEASE, "WORKER_STOPPING"),
        (WorkerStoppingError(), None, True, Action.RELEASE, "WORKER_STOPPING"),
        (WorkerStoppingError(), ValueError(), True, Action.RELEASE, "WORKER_STOPPING"),
    ],
)
def test_the_ending_of_a_run(
    told: BaseException | None, raised: BaseException | None, release: bool, action: Action, code: str | None
) -> None:
    job = JobContext(1)
    if told is not None:
        job.cancel(told)
    ending = decide_ending(job, raised, classify=classify, release_on_stop=release, scratch_root="/s")
    assert (ending.action, ending.code) == (action, code)


def test_a_classifier_that_breaks_fails_the_job(caplog: pytest.LogCaptureFixture) -> None:
    def broken(error: BaseException) -> RetryDecision:
        raise ZeroDivisionError

    ending = decide_ending(
        JobContext(1), ValueError(), classify=broken, release_on_stop=False, scratch_root="/s"
    )
    assert (ending.action, ending.code) == (Action.FAIL, "CLASSIFIER_FAILED")
    assert "the classifier broke" in caplog.text
