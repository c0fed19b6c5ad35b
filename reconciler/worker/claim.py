"""Claim: become the one holder of a queued job.

The attempt number grows with every claim and never shrinks; together with the worker's id it is the
fence that every later statement of this run carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reconciler.model import TableSpec
from reconciler.sla import MAX_LEASE_SEC
from reconciler.worker import metrics
from reconciler.worker.errors import ArgumentError, LeaseLostError
from reconciler.worker.sdk import Sdk, current
from reconciler.worker.statements import Query, Rows, Steps, compose, primitive


@dataclass(frozen=True, slots=True)
class Claim:
    """One run of one job, as its holder knows it. Everything a fenced statement needs.

    `lease_sec` is the length of the lease in seconds. Where it was computed from the row's stage
    (`lease_by_stage`), every beat computes it afresh; where the caller gave it, beats keep it.
    """

    table: str
    id: Any
    worker_id: str
    attempt: int
    stage: str | None = None
    lease_sec: float | None = None
    lease_by_stage: bool = False
    recovered: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        """This run among all runs of all jobs."""
        return (self.table, str(self.id), self.attempt)

    @property
    def asked_lease_sec(self) -> float | None:
        """What the caller asked for; None lets the stage decide."""
        return None if self.lease_by_stage else self.lease_sec

    def lost(self, why: str = "") -> LeaseLostError:
        """The error to raise when the fence does not hold."""
        return LeaseLostError(self.table, self.id, self.worker_id, self.attempt, why=why)

    def fence_params(self) -> dict[str, Any]:
        """The parameters of the `fence` fragment. The id travels as text and takes its column's type."""
        return {"id": str(self.id), "holder": self.worker_id, "attempt": self.attempt}


@primitive
def claim_job(
    table: str, job_id: Any, worker_id: str, lease_sec: float | None = None, *, sdk: Sdk | None = None
) -> Steps[Claim | None]:
    """Claim this job if it is queued, due and not exhausted; None when somebody else has it, or had it.

    For callers whose queue (pg-boss, SQS) already told them which job: a duplicate delivery gets None.
    """
    context = current(sdk)
    spec = context.spec(table)
    params = {
        **_claim_params(context, worker_id, lease_sec),
        "id": str(job_id),
    }
    rows = yield Query(table, compose(spec, "claim", which="one", page="one_page"), params)
    if not rows:
        metrics.ACQUIRE_CONFLICTS.add(1)
        return None
    return _claims(spec, rows, worker_id, lease_sec)[0]


@primitive
def claim_next(
    table: str,
    worker_id: str,
    *,
    stages: Sequence[str] | None = None,
    limit: int = 1,
    lease_sec: float | None = None,
    sdk: Sdk | None = None,
) -> Steps[list[Claim]]:
    """Claim up to `limit` jobs that are queued, due and not exhausted, of these stages or of any."""
    context = current(sdk)
    spec = context.spec(table)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ArgumentError("limit", limit, "a whole number of at least 1", "ask for as many as you can run")
    params = {**_claim_params(context, worker_id, lease_sec), "limit": limit}
    which = "any"
    if stages is not None:
        if isinstance(stages, str):
            raise ArgumentError("stages", stages, "a list of stages", f"write [{stages!r}]")
        params["stages"] = [check_stage(stage) for stage in stages]
        which = "staged"
    rows = yield Query(table, compose(spec, "claim", which=which, page="any_page"), params)
    return _claims(spec, rows, worker_id, lease_sec)


def check_stage(stage: object) -> str:
    """A stage is a word. Any word: one without an SLA factor gets the default lease."""
    if not isinstance(stage, str) or not stage.strip() or "\x00" in stage:
        raise ArgumentError("stage", stage, "a non-empty word such as clip, asr or burnin")
    return stage


def check_lease(lease_sec: object) -> float | None:
    """A lease of zero or less would be lost at once; one of a century is a typing mistake."""
    if lease_sec is None:
        return None
    if (
        not isinstance(lease_sec, int | float)
        or isinstance(lease_sec, bool)
        or not 0 < lease_sec <= MAX_LEASE_SEC
    ):
        raise ArgumentError(
            "lease_sec", lease_sec, f"seconds, more than 0 and at most {MAX_LEASE_SEC}",
            "leave it out to let the job's stage decide",
        )  # fmt: skip
    return lease_sec


def _claim_params(sdk: Sdk, worker_id: str, lease_sec: float | None) -> dict[str, Any]:
    if not isinstance(worker_id, str) or not worker_id.strip() or "\x00" in worker_id:
        raise ArgumentError(
            "worker_id", worker_id, "a non-empty name", "reconciler.worker.worker_identity() builds one"
        )
    return {
        **sdk.lease_params,
        "max_attempts": sdk.policy.max_attempts,
        "holder": worker_id,
        "lease_sec": check_lease(lease_sec),
    }


def _claims(spec: TableSpec, rows: Rows, worker_id: str, lease_sec: float | None) -> list[Claim]:
    claims = [
        Claim(spec.name, job_id, worker_id, attempt, stage, granted, lease_sec is None, recovered)
        for job_id, attempt, stage, granted, recovered in rows
    ]
    found = sum(claim.recovered for claim in claims)
    if found:
        metrics.RECOVERED_JOBS.add(found, reason="stale")
    return claims
