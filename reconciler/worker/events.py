"""Events a worker writes into `job_events`: under the fence, so that a zombie tells no stories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reconciler.worker.claim import Claim
from reconciler.worker.errors import ArgumentError
from reconciler.worker.sdk import Sdk, current
from reconciler.worker.statements import Query, Steps, compose, primitive

ABORTED_SHUTDOWN = "aborted:shutdown"
PROGRESS = "progress"
UPLOADED = "uploaded"
DONE = "done"


@primitive
def emit_event(
    claim: Claim, kind: str, details: Mapping[str, Any] | None = None, *, sdk: Sdk | None = None
) -> Steps[None]:
    """Write one event of this run. LeaseLostError when the run is no longer ours."""
    context = current(sdk)
    if not isinstance(kind, str) or not kind:
        raise ArgumentError("type", kind, "a non-empty word such as progress")
    about = {"worker": claim.worker_id, "attempt": claim.attempt, "stage": claim.stage, **(details or {})}
    try:
        text = json.dumps(about, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "details", details, f"values that JSON can hold ({error})", "convert dates, ids and bytes to text"
        ) from error
    params = {
        **claim.fence_params(),
        "event_job": str(claim.id),
        "type": kind,
        "name": claim.table,
        # jsonb cannot hold NUL; an error message can.
        "details": text.replace("\\u0000", "\\ufffd"),
    }
    rows = yield Query(claim.table, compose(context.spec(claim.table), "emit"), params)
    if not rows:
        raise claim.lost()


@primitive
def job_row(claim: Claim, *, sdk: Sdk | None = None) -> Steps[dict[str, Any]]:
    """The whole row as a dict: what the app wrote into the job. LeaseLostError when it is no longer ours."""
    context = current(sdk)
    rows = yield Query(claim.table, compose(context.spec(claim.table), "row"), claim.fence_params())
    if not rows:
        raise claim.lost()
    row: dict[str, Any] = rows[0][0]
    return row
