"""A worker as a process: the job's stage says what its handler does. Started by tests/worker_fleet.py."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from typing import Any

import psycopg

from reconciler.worker import JobContext, Worker, configure, set_up_logging
from tests.worker_settings import a_fast_sdk

DSN = os.environ["DATABASE_URL"]


def told(job: JobContext, what: str) -> None:
    """Unfenced, on a connection of its own: the test wants to see what really ran."""
    with psycopg.connect(DSN, autocommit=True) as conn:
        conn.execute(
            "insert into effects (job_id, attempt, pid, what) values (%s, %s, %s, %s)",
            (str(job.job_id), job.attempt, os.getpid(), what),
        )


def quick(job: JobContext) -> None:
    """The effect that must happen once: written under the fence, right before the end."""
    told(job, "began")
    job.assert_held()
    with psycopg.connect(DSN, autocommit=True) as conn:
        conn.execute(
            "insert into results values (%s, %s)"
            " on conflict (job_id) do update set attempt = excluded.attempt",
            (str(job.job_id), job.attempt),
        )
    told(job, "ended")


def slow(job: JobContext, seconds: float = 3600.0) -> None:
    """Works on until told to stop."""
    told(job, "began")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        job.check()
        time.sleep(0.01)
    job.assert_held()
    told(job, "ended")


def short(job: JobContext) -> None:
    slow(job, 1.5)


def brief(job: JobContext) -> None:
    """Ends without a word to the database."""
    told(job, "began")
    time.sleep(3)


def stubborn(job: JobContext) -> None:
    """Does not listen, and publishes without asking first: the zombie that the fence must stop."""
    told(job, "began")
    time.sleep(6)
    told(job, "ended")


async def deaf(job: JobContext) -> None:
    """Swallows its cancellation, for ever."""
    told(job, "began")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            told(job, "ignored")


def staged(job: JobContext) -> None:
    """Speaks to the database all the time, and minds no restart of it."""
    told(job, "began")
    until = time.monotonic() + 2.5
    number = 0
    while time.monotonic() < until:
        number += 1
        job.set_stage(f"step-{number % 2}")
        time.sleep(0.05)


def gil(job: JobContext) -> None:
    """Holds the GIL in C for seconds: a regular expression without a way out."""
    told(job, "began")
    until = time.monotonic() + 6
    size = 18
    while time.monotonic() < until:
        began = time.monotonic()
        re.match(r"(a+)+$", "a" * size + "b")
        if time.monotonic() - began < 4:
            size += 1
    told(job, "ended")


def chaos(job: JobContext) -> None:
    """A short job whose effect is published under the fence; a second effect is an error."""
    assert job.claim is not None
    time.sleep(random.uniform(0.05, 0.8))
    with psycopg.connect(DSN, autocommit=True) as conn:
        row = conn.execute(
            "select publish(%s, %s, %s)", (job.job_id, job.attempt, job.claim.worker_id)
        ).fetchone()
    if row != (True,):
        raise job.claim.lost()


def handle(job: JobContext) -> None:
    globals()[job.stage or "quick"](job)


def main() -> None:
    options: dict[str, Any] = json.loads(os.environ["WORKER_OPTIONS"])
    sdk = a_fast_sdk(lease_sec=options.pop("lease_sec", 3), beat_sec=options.pop("beat_sec", 1))
    configure(sdk)
    set_up_logging(form="text")
    handler = globals()[options.pop("program", "handle")]
    Worker(DSN, {"jobs": handler}, poll_sec=options.pop("poll_sec", 0.2), **options).run()


if __name__ == "__main__":
    main()
