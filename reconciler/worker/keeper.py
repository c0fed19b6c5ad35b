"""Keeper: which jobs this worker holds, until when, and what happens when that passes.

Two clocks run for each job. The *lease*: when no beat could be confirmed for the lease minus a margin, some
other worker may soon run the job, so ours is cancelled first (the self-fence). The *budget*: a job past its
hard limit is cancelled and no longer beaten, because a wedged handler must not look alive for ever.

Only the monotonic clock is used, and every lease counts from the moment its statement was *sent*: the
server's lease is never shorter than what we believe. The thread here touches no database, so that no
blocked connection can stop it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from reconciler.worker import metrics
from reconciler.worker.claim import Claim
from reconciler.worker.errors import JobTimeoutError

Key = tuple[str, str, int]
Cancel = Callable[[BaseException], None]

_log = logging.getLogger(__name__)


def margin_sec(lease_sec: float) -> float:
    """How long before the lease's end a worker gives up: a tenth, within reason."""
    return min(max(lease_sec * 0.1, min(1.0, lease_sec / 4)), 30.0)


@dataclass(slots=True)
class Held:
    """One running job."""

    claim: Claim
    cancel: Cancel
    sent_at: float
    fence_at: float
    budget_at: float | None
    cancelled: bool = False
    ending: bool = False


class Keeper:
    """All jobs this worker holds. Every method may be called from any thread."""

    def __init__(
        self, *, on_change: Callable[[], None] = lambda: None, catch_up: Callable[[], None] = lambda: None
    ) -> None:
        self._held: dict[Key, Held] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._on_change = on_change
        self._catch_up = catch_up
        self._thread = threading.Thread(target=self._watch, name="job-reaper-keeper", daemon=True)

    def start(self) -> None:
        """Begin to watch the clock."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; held jobs are forgotten."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(5)

    def hold(self, claim: Claim, *, sent_at: float, budget_sec: float | None, cancel: Cancel) -> None:
        """Keep this job from now on. `sent_at` is the monotonic time before its claim was sent."""
        held = Held(
            claim,
            cancel,
            sent_at,
            fence_at(claim, sent_at),
            None if budget_sec is None else sent_at + budget_sec,
        )
        with self._changed:
            self._held[claim.key] = held
            self._changed.notify_all()
        self._on_change()

    def renewed(self, claim: Claim, sent_at: float) -> None:
        """A beat was confirmed: the lease counts from when it was sent."""
        with self._changed:
            held = self._held.get(claim.key)
            # A beat that was sent before a change of stage knows only the old stage's lease.
            if held is not None and sent_at > held.sent_at:
                held.sent_at = sent_at
                held.fence_at = fence_at(claim, sent_at)
                if held.claim.lease_by_stage:
                    held.claim = replace(held.claim, lease_sec=claim.lease_sec)
                self._changed.notify_all()

    def staged(self, claim: Claim, sent_at: float) -> None:
        """The job entered another stage, which may have a shorter lease."""
        with self._changed:
            held = self._held.get(claim.key)
            if held is not None:
                held.claim = claim
                held.sent_at = sent_at
                held.fence_at = fence_at(claim, sent_at)
                self._changed.notify_all()
        self._on_change()

    def rebudget(self, claim: Claim, budget_at: float | None) -> None:
        """The hard budget changes with the stage."""
        with self._changed:
            held = self._held.get(claim.key)
            if held is not None:
                held.budget_at = budget_at
                self._changed.notify_all()

    def ending(self, claim: Claim) -> None:
        """The handler is through. Beats go on, but now the ending statement tells who owns the job."""
        with self._changed:
            held = self._held.get(claim.key)
            if held is not None:
                held.ending = True

    def drop(self, claim: Claim) -> None:
        """This run is over."""
        with self._changed:
            self._held.pop(claim.key, None)
        self._on_change()

    def lost(self, claim: Claim, error: BaseException, reason: str) -> None:
        """The fence does not hold any more: cancel the run."""
        self._cancel(claim.key, error, reason)

    def claims(self) -> list[Claim]:
        """What is to be beaten now."""
        with self._changed:
            return [held.claim for held in self._held.values() if not held.cancelled]

    def schedule(self) -> list[tuple[Claim, float, float | None]]:
        """The same with each lease's begin and budget's end, which a beating process must know by itself."""
        with self._changed:
            return [
                (held.claim, held.sent_at, held.budget_at)
                for held in self._held.values()
                if not held.cancelled
            ]

    def sec_to_fence(self, claim: Claim) -> float:
        """How long this job may still wait for its beat."""
        with self._changed:
            held = self._held.get(claim.key)
            return 0.0 if held is None else max(0.0, held.fence_at - time.monotonic())

    def shortest_lease_sec(self) -> float | None:
        """What the pace of the beats must follow."""
        with self._changed:
            leases = [
                held.claim.lease_sec for held in self._held.values() if held.claim.lease_sec is not None
            ]
        return min(leases, default=None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                now = time.monotonic()
                due = [
                    (key, held)
                    for key, held in self._held.items()
                    if not held.cancelled and not held.ending and _deadline(held) <= now
                ]
                if not due:
                    upcoming = [
                        _deadline(held)
                        for held in self._held.values()
                        if not held.cancelled and not held.ending
                    ]
                    self._changed.wait(min(upcoming) - now if upcoming else None)
                    continue
            try:
                # This thread may have slept through good news that waits to be read (a GIL held in C).
                self._catch_up()
                self._cancel_late(due, now)
            except Exception:  # noqa: BLE001 - a keeper that ends fences nobody any more; logged
                _log.exception("the keeper broke, going on")

    def _cancel_late(self, due: list[tuple[Key, Held]], now: float) -> None:
        for key, held in due:
            if held.budget_at is not None and held.budget_at <= now:
                self._cancel(key, JobTimeoutError("the job ran past its max_runtime"), "budget")
            elif held.fence_at <= now:
                self._cancel(key, held.claim.lost("no beat could be confirmed in time"), "self_fenced")

    def _cancel(self, key: Key, error: BaseException, reason: str) -> None:
        with self._changed:
            held = self._held.get(key)
            if held is None or held.cancelled or held.ending:
                return
            held.cancelled = True
        self._on_change()
        metrics.LEASES_LOST.add(1, reason=reason)
        _log.warning("job cancelled", extra={"job_id": key[1], "table": key[0], "reason": reason})
        held.cancel(error)


def fence_at(claim: Claim, sent_at: float) -> float:
    """When the worker must give this job up, if no later beat is confirmed."""
    lease_sec = claim.lease_sec or 0.0
    return sent_at + lease_sec - margin_sec(lease_sec)


def _deadline(held: Held) -> float:
    return held.fence_at if held.budget_at is None else min(held.fence_at, held.budget_at)
