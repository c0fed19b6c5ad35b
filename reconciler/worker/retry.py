"""Retry: is this error worth another run?

A value, not a habit: `classify` answers with a code and a yes or no, and the worker acts on it. Fatal is the
default (the documents' rule): repeating a bug costs more than looking at it. What is known to pass by itself
is retryable: the listed codes, network trouble, 429 and 5xx, a lost database connection.
"""

from __future__ import annotations

import errno
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from reconciler.worker.errors import ArgumentError, JobError, JobTimeoutError, LeaseLostError

RETRYABLE_CODES = frozenset(
    {
        "STORAGE_UPLOAD_FAILED",
        "YTDLP_TIMEOUT",
        "CLIP_TIMEOUT",
        "UPSTREAM_FAILURE",
        "INTERNAL_TRANSIENT",
    }
)

_NETWORK_ERRNOS = frozenset(
    {
        errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT,
        errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.EHOSTDOWN, errno.EAGAIN,
    }
)  # fmt: skip
# Names of network errors in the usual clients, which the SDK does not import (requests, urllib3, httpx, …).
_NETWORK_NAMES = re.compile(
    r"^(Connect(ion)?(Timeout|Error)|ReadTimeout|WriteTimeout|PoolTimeout|ReadError|WriteError|RemoteProtocolError"
    r"|ReadTimeoutError|NewConnectionError|ProtocolError|ServerDisconnectedError|ClientConnectorError"
    r"|EndpointConnectionError|APIConnectionError|APITimeoutError|IncompleteRead)$"
)
_PASSING_STATUSES = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """What to do about an error, and the code that goes into the row and the metric."""

    retryable: bool
    code: str


Rule = Callable[[BaseException], RetryDecision | None]


def http_status(error: BaseException) -> int | None:
    """The HTTP status an error carries, wherever its client puts it."""
    response = getattr(error, "response", None)
    places: list[Any] = [
        getattr(error, "status_code", None), getattr(error, "status", None), getattr(error, "code", None),
        getattr(response, "status_code", None), getattr(response, "status", None),
    ]  # fmt: skip
    if isinstance(response, dict):  # botocore
        places.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    for status in places:
        if isinstance(status, int) and not isinstance(status, bool) and 400 <= status <= 599:
            return status
    return None


def is_retryable(error: BaseException) -> bool:
    """True for what passes by itself: network, 429, 5xx, the documents' codes."""
    return classify(error).retryable


def classify(
    error: BaseException, *, retryable_codes: Iterable[str] = RETRYABLE_CODES, rules: Iterable[Rule] = ()
) -> RetryDecision:
    """Judge an error. Your own `rules` are asked first; the first answer wins."""
    rules = tuple(rules)
    for rule in rules:
        decision = rule(error)
        if decision is not None:
            return decision
    if isinstance(error, BaseExceptionGroup):
        return _classify_group(error, retryable_codes, rules)
    if isinstance(error, JobError):
        wanted = error.retryable
        return RetryDecision(
            error.code in frozenset(retryable_codes) if wanted is None else wanted, error.code
        )
    return _classify_foreign(error)


def _classify_group(
    group: BaseExceptionGroup[BaseException], codes: Iterable[str], rules: tuple[Rule, ...]
) -> RetryDecision:
    """One fatal member makes the whole group fatal."""
    decisions = [classify(member, retryable_codes=codes, rules=rules) for member in group.exceptions]
    return next((decision for decision in decisions if not decision.retryable), decisions[0])


def _classify_foreign(error: BaseException) -> RetryDecision:
    status = http_status(error)
    if status is not None:
        return RetryDecision(status in _PASSING_STATUSES or status >= 500, f"HTTP_{status}")
    for kind, retryable, code in _known():
        if isinstance(error, kind):
            return RetryDecision(retryable, code)
    if (
        isinstance(error, ConnectionError | TimeoutError)
        or (isinstance(error, OSError) and error.errno in _NETWORK_ERRNOS)
        or _NETWORK_NAMES.match(type(error).__name__)
    ):
        return RetryDecision(True, "NETWORK")
    return RetryDecision(False, f"HANDLER_{type(error).__name__}"[:100])


def _known() -> tuple[tuple[type[BaseException], bool, str], ...]:
    import psycopg  # noqa: PLC0415 - keeps this module free for pure tests

    return (
        (LeaseLostError, False, "lease_lost"),
        (ArgumentError, False, "VALIDATION"),
        (psycopg.OperationalError, True, "INTERNAL_TRANSIENT"),
        (psycopg.errors.ReadOnlySqlTransaction, True, "INTERNAL_TRANSIENT"),  # in the middle of a failover
        (subprocess.TimeoutExpired, True, "SUBPROCESS_TIMEOUT"),
    )


__all__ = [
    "RETRYABLE_CODES",
    "JobTimeoutError",
    "RetryDecision",
    "classify",
    "http_status",
    "is_retryable",
]
