"""What can go wrong between a worker and its job.

ReaperError
├── LeaseLostError         the fence does not hold: this run belongs to somebody else, stop
├── UsageError
│   └── ArgumentError      an argument that cannot be (also a ValueError)
└── JobError               raised by handlers: carries the code that decides about a retry
    ├── JobTimeoutError    the job's time budget is used up; never retried
    └── EmptyOutputError   a 0-byte result: corruption, worth another run
"""

from __future__ import annotations

from typing import Any

from reconciler.errors import ReaperError, UsageError


class LeaseLostError(ReaperError):
    """You no longer own this job: it was reaped, released or finished. Stop, publish nothing."""

    code = "lease_lost"

    def __init__(self, table: str, job_id: Any, worker_id: str, attempt: int, *, why: str = "") -> None:
        self.table = table
        self.job_id = job_id
        self.worker_id = worker_id
        self.attempt = attempt
        super().__init__(
            f"job {job_id} of {table}, attempt {attempt}, is no longer held by {worker_id}"
            f"{': ' + why if why else ''}. Stop the work and publish nothing; another run owns the job"
        )


class ArgumentError(UsageError, ValueError):
    """An argument that no job could be served with: which, its value, what is allowed, what to do."""

    code = "argument"

    def __init__(self, key: str, value: object, allowed: str, hint: str = "") -> None:
        self.key = key
        self.value = value
        self.allowed = allowed
        self.hint = hint
        super().__init__(f"{key}={value!r}: {allowed}{'. ' + hint if hint else ''}")


class JobError(ReaperError):
    """Raise this in a handler to say why. `retryable` overrides what the code alone would decide."""

    code = "JOB_FAILED"

    def __init__(
        self, code: str | int | None = None, message: str = "", *, retryable: bool | None = None
    ) -> None:
        # str: an HTTP status is a code too, and fail_code is text. A subclass may say it in its own `code`.
        word = str(self.code if code is None else code)
        super().__init__(message or word, code=word)
        self.retryable = retryable


class JobTimeoutError(JobError):
    """The job's budget is used up. Running it again would use it up again."""

    code = "JOB_TIMEOUT"

    def __init__(self, message: str = "the job's time budget is used up") -> None:
        super().__init__(message=message, retryable=False)


class EmptyOutputError(JobError):
    """The work left a 0-byte file behind: damaged, not finished."""

    code = "EMPTY_OUTPUT"

    def __init__(self, message: str = "the output file is empty") -> None:
        super().__init__(message=message, retryable=True)


class WorkerStoppingError(JobError):
    """The worker must leave and cannot wait longer. Not the job's fault."""

    code = "WORKER_STOPPING"

    def __init__(self, message: str = "the worker is shutting down") -> None:
        super().__init__(message=message, retryable=True)
