"""Beat: say "still here" and push the lease ahead, for one job or for all of a worker's jobs at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from reconciler.worker.claim import Claim, check_lease, check_stage
from reconciler.worker.errors import ArgumentError
from reconciler.worker.sdk import Sdk, current
from reconciler.worker.statements import Query, Steps, compose, primitive


@dataclass(frozen=True, slots=True)
class BatchBeat:
    """What became of each claim of a batch.

    `beaten` carry the lease as granted now. `busy` rows are locked by somebody: still ours, not beaten;
    beat them singly. `lost` are no longer ours: cancel their work.
    """

    beaten: tuple[Claim, ...] = ()
    busy: tuple[Claim, ...] = ()
    lost: tuple[Claim, ...] = ()


@primitive
def heartbeat_job(claim: Claim, lease_sec: float | None = None, *, sdk: Sdk | None = None) -> Steps[Claim]:
    """Beat one job and extend its lease. Waits for a row lock. LeaseLostError when the fence does not hold.

    Returns the claim with the lease as granted; an explicit `lease_sec` is kept in it.
    """
    context = current(sdk)
    asked = check_lease(lease_sec) if lease_sec is not None else claim.asked_lease_sec
    params = {**context.lease_params, **claim.fence_params(), "lease_sec": asked}
    rows = yield Query(claim.table, compose(context.spec(claim.table), "beat"), params)
    if not rows:
        raise claim.lost()
    return replace(claim, lease_sec=rows[0][0], lease_by_stage=asked is None)


@primitive
def heartbeat_batch(claims: Iterable[Claim], *, sdk: Sdk | None = None) -> Steps[BatchBeat]:
    """Beat all these jobs: one UPDATE per table, which waits for no lock. Raises for no single job."""
    context = current(sdk)
    by_table: dict[str, list[Claim]] = {}
    for claim in claims:
        by_table.setdefault(claim.table, []).append(claim)
    beaten: list[Claim] = []
    busy: list[Claim] = []
    lost: list[Claim] = []
    for table, held in by_table.items():
        spec = context.spec(table)
        kind, ids = _typed([claim.id for claim in held])
        params: dict[str, Any] = {
            **context.lease_params,
            "lease_sec": None,
            "ids": ids,
            "holders": [claim.worker_id for claim in held],
            "attempts": [claim.attempt for claim in held],
            "leases": [claim.asked_lease_sec for claim in held],
            "id_column": spec.columns.id,
        }
        rows = yield Query(table, compose(spec, "beat_batch", held=kind), params)
        for claim, (_, granted, is_busy) in zip(held, rows, strict=True):
            if granted is not None:
                beaten.append(replace(claim, lease_sec=granted))
            else:
                (busy if is_busy else lost).append(claim)
    return BatchBeat(tuple(beaten), tuple(busy), tuple(lost))


def _typed(ids: list[Any]) -> tuple[str, list[Any]]:
    """The fragment that fits these ids; what is neither uuid nor a number travels as text."""
    if all(isinstance(one, UUID) for one in ids):
        return "held_uuid", ids
    if all(isinstance(one, int) for one in ids):
        return "held_bigint", ids
    return "held_text", [str(one) for one in ids]


@primitive
def set_stage(
    claim: Claim,
    stage: str,
    lease_sec: float | None = None,
    *,
    expected_duration_ms: int | None = None,
    sdk: Sdk | None = None,
) -> Steps[Claim]:
    """Enter a stage: the row's stage and a lease by that stage's SLA, in one step. Returns the new claim."""
    context = current(sdk)
    if expected_duration_ms is not None and (
        not isinstance(expected_duration_ms, int)
        or isinstance(expected_duration_ms, bool)
        or expected_duration_ms < 0
    ):
        raise ArgumentError(
            "expected_duration_ms", expected_duration_ms, "milliseconds, a whole number from 0"
        )
    asked = check_lease(lease_sec)
    params = {
        **context.lease_params,
        **claim.fence_params(),
        "lease_sec": asked,
        "stage": check_stage(stage),
        "stage_key": stage,
        "expected_ms": expected_duration_ms,
    }
    rows = yield Query(claim.table, compose(context.spec(claim.table), "set_stage"), params)
    if not rows:
        raise claim.lost()
    return replace(claim, stage=stage, lease_sec=rows[0][0], lease_by_stage=asked is None)


__all__: Sequence[str] = ("BatchBeat", "heartbeat_batch", "heartbeat_job", "set_stage")
