"""Budgets: until when a run may go on, as `max_runtime` says: for all jobs, by table, or by stage.

A stage's budget counts from the first time this run entered the stage: entering it again buys no time.
A budget for all or for a table counts from the claim. The stage's own wins over the table's.
"""

from __future__ import annotations

from collections.abc import Mapping

from reconciler.worker.claim import Claim


class Budgets:
    """What was given as `max_runtime`."""

    def __init__(self, limits: float | Mapping[str, float] | None) -> None:
        self._limits = limits

    def begin(self, claim: Claim, claimed_at: float) -> Budget:
        """The budget of one run, from its claim (monotonic clock)."""
        return Budget(self._limits, claim, claimed_at)


class Budget:
    """One run's."""

    def __init__(self, limits: float | Mapping[str, float] | None, claim: Claim, claimed_at: float) -> None:
        self._limits = limits
        self._table = claim.table
        self._claimed_at = claimed_at
        self._entered_at: dict[str, float] = {}
        self.ends_at: float | None = None
        self.enter(claim.stage, claimed_at)

    def enter(self, stage: str | None, at: float) -> float | None:
        """The run enters a stage: until when it may go on now."""
        limits = self._limits
        if limits is None:
            return None
        if not isinstance(limits, Mapping):
            self.ends_at = self._claimed_at + limits
        elif stage is not None and stage in limits:
            self.ends_at = self._entered_at.setdefault(stage, at) + limits[stage]
        else:
            limit = limits.get(self._table)
            self.ends_at = None if limit is None else self._claimed_at + limit
        return self.ends_at
