"""The interval loop: whatever a pass does, the next one runs, until told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from reconciler.logs import LOGGER
from reconciler.loop import IntervalLoop
from reconciler.report import PassReport

SOON = 10.0  # seconds a thread may take on a busy machine; never waited for when all is well


class CountedWaits(threading.Event):
    """An event whose waits take no time: it notes how long it was asked to wait, and is set after some."""

    def __init__(self, stop_after: int) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._stop_after = stop_after

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        if len(self.waits) >= self._stop_after:
            self.set()
        return self.is_set()


def a_loop(
    one_pass: Callable[[], PassReport], stopping: threading.Event, interval: float = 60.0
) -> IntervalLoop:
    return IntervalLoop(one_pass, interval, stopping)


def test_passes_run_until_told_to_stop() -> None:
    stopping = CountedWaits(3)
    passes: list[int] = []

    def one_pass() -> PassReport:
        passes.append(1)
        return PassReport()

    a_loop(one_pass, stopping).run()
    assert len(passes) == 3


def test_no_pass_runs_when_stopped_before_the_start() -> None:
    stopping = threading.Event()
    stopping.set()
    a_loop(lambda: pytest.fail("a pass ran"), stopping).run()


def test_a_crashing_pass_is_logged_and_the_next_one_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    stopping = CountedWaits(3)

    def one_pass() -> PassReport:
        raise ZeroDivisionError("a bug")

    a_loop(one_pass, stopping).run()
    assert len(stopping.waits) == 3
    crashed = [record for record in caplog.records if "pass crashed" in record.message]
    assert len(crashed) == 3
    assert all(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in crashed)


def test_the_interval_varies_by_a_tenth_and_no_more() -> None:
    stopping = CountedWaits(2000)
    a_loop(PassReport, stopping, interval=60.0).run()
    assert all(54.0 <= wait <= 66.0 for wait in stopping.waits)
    assert min(stopping.waits) < 56.0
    assert max(stopping.waits) > 64.0


def test_a_stop_during_the_wait_ends_the_loop_at_once() -> None:
    stopping, ran = threading.Event(), threading.Event()

    def one_pass() -> PassReport:
        ran.set()
        return PassReport()

    loop = a_loop(one_pass, stopping, interval=3600.0)
    loop.start()
    assert ran.wait(SOON)
    stopping.set()
    loop.join(SOON)


def test_a_pass_that_does_not_end_is_said_so() -> None:
    stopping, began, may_end = threading.Event(), threading.Event(), threading.Event()

    def one_pass() -> PassReport:
        began.set()
        may_end.wait(SOON)
        return PassReport()

    loop = a_loop(one_pass, stopping)
    loop.start()
    assert began.wait(SOON)
    stopping.set()
    with pytest.raises(TimeoutError, match=r"did not end within 0\.01 s"):
        loop.join(0.01)
    may_end.set()
    loop.join(SOON)


def test_joining_a_loop_that_was_never_started_is_nothing() -> None:
    a_loop(PassReport, threading.Event()).join(0.0)


def test_health_means_that_passes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing pass is progress, a hung one is not."""
    now = [1000.0]
    monkeypatch.setattr("reconciler.loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    healths: list[bool] = []

    def one_pass() -> PassReport:
        healths.append(loop.healthy)
        now[0] += 179.0
        healths.append(loop.healthy)
        now[0] += 2.0
        healths.append(loop.healthy)
        raise ZeroDivisionError("a bug")

    loop = a_loop(one_pass, CountedWaits(1), interval=60.0)
    loop.run()
    assert healths == [True, True, False]
    assert loop.healthy
