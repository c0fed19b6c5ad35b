"""The keeper of the beating process: it knows what the parent holds, cancels nothing, and reports instead."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from reconciler.worker.claim import Claim
from reconciler.worker.keeper import Keeper, Key, fence_at
from reconciler.worker.news import News


@dataclass(slots=True)
class _Job:
    claim: Claim
    sent_at: float
    budget_at: float | None


class ChildKeeper(Keeper):
    """Holds what the parent holds, cancels nothing, and reports instead."""

    def __init__(self, news: News) -> None:
        super().__init__()
        self._news = news
        self._jobs: dict[Key, _Job] = {}
        self._mine = threading.Lock()

    def take_over(self, jobs: list[dict[str, Any]]) -> None:
        now_held = {}
        with self._mine:
            for row in jobs:
                job = _Job(Claim(**row["claim"]), row["sent_at"], row["budget_at"])
                known = self._jobs.get(job.claim.key)
                if known is not None:  # the parent may not have heard of our last beat yet
                    job.sent_at = max(job.sent_at, known.sent_at)
                now_held[job.claim.key] = job
            self._jobs = now_held

    def claims(self) -> list[Claim]:
        now = time.monotonic()
        with self._mine:
            return [job.claim for job in self._jobs.values() if job.budget_at is None or now < job.budget_at]

    def shortest_lease_sec(self) -> float | None:
        return min((claim.lease_sec for claim in self.claims() if claim.lease_sec is not None), default=None)

    def sec_to_fence(self, claim: Claim) -> float:
        with self._mine:
            job = self._jobs.get(claim.key)
            return 0.0 if job is None else max(0.0, fence_at(job.claim, job.sent_at) - time.monotonic())

    def renewed(self, claim: Claim, sent_at: float) -> None:
        with self._mine:
            job = self._jobs.get(claim.key)
            if job is not None:
                job.sent_at = max(job.sent_at, sent_at)
        self._news.renewed(claim, sent_at)

    def lost(self, claim: Claim, error: BaseException, reason: str) -> None:
        with self._mine:
            self._jobs.pop(claim.key, None)
        self._news.lost(claim)
