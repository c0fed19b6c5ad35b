"""Retry classification: the documents' lists, line by line."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import urllib.error
from email.message import Message
from typing import Any

import psycopg
import pytest

from reconciler.worker import (
    ArgumentError,
    EmptyOutputError,
    JobError,
    JobTimeoutError,
    LeaseLostError,
    RetryDecision,
    classify,
    is_retryable,
)
from reconciler.worker.retry import RETRYABLE_CODES, http_status

DOCUMENT_CODES = (
    "STORAGE_UPLOAD_FAILED",
    "YTDLP_TIMEOUT",
    "CLIP_TIMEOUT",
    "UPSTREAM_FAILURE",
    "INTERNAL_TRANSIENT",
)


class Answer:
    def __init__(self, status: int) -> None:
        self.status_code = status


class HttpError(Exception):
    def __init__(self, **places: Any) -> None:
        super().__init__("http")
        vars(self).update(places)


class ReadTimeout(Exception):  # noqa: N818 - the name the client libraries use
    pass


@pytest.mark.parametrize("code", DOCUMENT_CODES)
def test_unit_classify_retryable_mapping(code: str) -> None:
    assert classify(JobError(code)) == RetryDecision(True, code)


@pytest.mark.parametrize(
    "error",
    [
        JobError("FFMPEG_FAILED"), JobError(), ValueError("bad"), KeyError("x"), JobTimeoutError(),
        LeaseLostError("jobs", 1, "w", 1), ArgumentError("k", 1, "no"), FileNotFoundError(),
        PermissionError(),
        asyncio.CancelledError(), SystemExit(1), psycopg.errors.UniqueViolation(), ZeroDivisionError(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_unit_classify_fatal_mapping(error: BaseException) -> None:
    decision = classify(error)
    assert not decision.retryable
    assert decision.code


def test_the_documents_codes_are_the_whole_list() -> None:
    assert frozenset(DOCUMENT_CODES) == RETRYABLE_CODES


@pytest.mark.parametrize(
    ("status", "retryable"),
    [(400, False), (401, False), (403, False), (404, False), (408, True), (409, False), (422, False),
     (429, True), (500, True), (502, True), (503, True), (504, True), (599, True)],
)  # fmt: skip
@pytest.mark.parametrize("place", ["status", "status_code", "code", "response", "botocore", "urllib"])
def test_http_status_decides_wherever_the_client_keeps_it(status: int, retryable: bool, place: str) -> None:
    error: Exception
    if place == "response":
        error = HttpError(response=Answer(status))
    elif place == "botocore":
        error = HttpError(response={"ResponseMetadata": {"HTTPStatusCode": status}})
    elif place == "urllib":
        error = urllib.error.HTTPError("http://x", status, "m", Message(), None)
    else:
        error = HttpError(**{place: status})
    assert classify(error) == RetryDecision(retryable, f"HTTP_{status}")
    if isinstance(error, urllib.error.HTTPError):
        error.close()


def test_a_status_that_is_no_failure_decides_nothing() -> None:
    assert http_status(HttpError(status=200, code="E1", status_code=True)) is None


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(), ConnectionRefusedError(), BrokenPipeError(), TimeoutError(),
        OSError(errno.EHOSTUNREACH, "no route"), OSError(errno.ENETUNREACH, "no net"), ReadTimeout(),
        psycopg.OperationalError("server closed the connection"), subprocess.TimeoutExpired("yt-dlp", 5),
        EmptyOutputError(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_network_errors_are_retryable(error: BaseException) -> None:
    assert is_retryable(error)


def test_retryable_on_the_error_overrides_its_code() -> None:
    assert classify(JobError("FFMPEG_FAILED", retryable=True)).retryable
    assert not classify(JobError("UPSTREAM_FAILURE", retryable=False)).retryable


def test_own_rules_and_codes_extend_the_list() -> None:
    def rule(error: BaseException) -> RetryDecision | None:
        return RetryDecision(True, "MINE") if isinstance(error, ZeroDivisionError) else None

    assert classify(ZeroDivisionError(), rules=[rule]) == RetryDecision(True, "MINE")
    assert not classify(ValueError(), rules=[rule]).retryable
    assert classify(JobError("GPU_BUSY"), retryable_codes=RETRYABLE_CODES | {"GPU_BUSY"}).retryable


def test_a_group_is_as_fatal_as_its_most_fatal_member() -> None:
    assert classify(ExceptionGroup("g", [ConnectionError(), TimeoutError()])).retryable
    mixed = classify(ExceptionGroup("g", [ConnectionError(), ExceptionGroup("h", [ValueError()])]))
    assert mixed == RetryDecision(False, "HANDLER_ValueError")
