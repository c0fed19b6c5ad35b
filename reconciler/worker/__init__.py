"""The worker SDK: claim a job, keep its lease, end it; and a runtime that does all three for you.

What may live here: whatever a worker process needs, on psycopg alone. Nothing of Kubernetes, nothing of
the reaper; a worker image pays for what it uses. The runtime, the metrics endpoint and the configuration
reader are loaded when they are first used.
"""

from __future__ import annotations

from reconciler.worker.beat import BatchBeat, heartbeat_batch, heartbeat_job, set_stage
from reconciler.worker.claim import Claim, claim_job, claim_next
from reconciler.worker.errors import (
    ArgumentError,
    EmptyOutputError,
    JobError,
    JobTimeoutError,
    LeaseLostError,
)
from reconciler.worker.finish import Retried, end_lease, finish_job, release_job, retry_job
from reconciler.worker.sdk import Sdk, configure

__all__ = [
    "ArgumentError",
    "BatchBeat",
    "Claim",
    "EmptyOutputError",
    "JobError",
    "JobTimeoutError",
    "LeaseLostError",
    "Retried",
    "Sdk",
    "claim_job",
    "claim_next",
    "configure",
    "end_lease",
    "finish_job",
    "heartbeat_batch",
    "heartbeat_job",
    "release_job",
    "retry_job",
    "set_stage",
]
