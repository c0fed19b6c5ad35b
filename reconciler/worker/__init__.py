"""The worker SDK: claim a job, keep its lease, end it; and a runtime that does all three for you.

What may live here: whatever a worker process needs, on psycopg alone. Nothing of Kubernetes, nothing of
the reaper; a worker image pays for what it uses. The runtime, the metrics endpoint and the configuration
reader are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    "JobContext",
    "JobError",
    "JobTimeoutError",
    "LeaseLostError",
    "Progress",
    "Retried",
    "RetryDecision",
    "Sdk",
    "Worker",
    "already_published",
    "check_job_timeout",
    "claim_job",
    "claim_next",
    "classify",
    "configure",
    "current_job",
    "emit_event",
    "end_lease",
    "finish_job",
    "heartbeat_batch",
    "heartbeat_job",
    "is_retryable",
    "job_row",
    "publish",
    "release_job",
    "remaining",
    "retry_job",
    "run_command",
    "run_with_job_context",
    "set_stage",
    "set_up_logging",
    "timeout_for",
    "to_thread",
    "with_stage",
    "worker_identity",
]

_LATE = {
    "JobContext": "context",
    "Progress": "progress",
    "RetryDecision": "retry",
    "Worker": "runtime",
    "already_published": "output",
    "check_job_timeout": "context",
    "classify": "retry",
    "current_job": "context",
    "emit_event": "events",
    "is_retryable": "retry",
    "job_row": "events",
    "publish": "output",
    "remaining": "context",
    "run_command": "command",
    "run_with_job_context": "context",
    "set_up_logging": "logs",
    "timeout_for": "context",
    "to_thread": "handlers",
    "with_stage": "stage",
    "worker_identity": "identity",
}
if TYPE_CHECKING:
    from reconciler.worker.command import run_command
    from reconciler.worker.context import (
        JobContext,
        check_job_timeout,
        current_job,
        remaining,
        run_with_job_context,
        timeout_for,
    )
    from reconciler.worker.events import emit_event, job_row
    from reconciler.worker.handlers import to_thread
    from reconciler.worker.identity import worker_identity
    from reconciler.worker.logs import set_up_logging
    from reconciler.worker.output import already_published, publish
    from reconciler.worker.progress import Progress
    from reconciler.worker.retry import RetryDecision, classify, is_retryable
    from reconciler.worker.runtime import Worker
    from reconciler.worker.stage import with_stage


def __getattr__(name: str) -> Any:
    # Late, because a dispatcher that only claims and finishes must not pay for the runtime.
    module = _LATE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
