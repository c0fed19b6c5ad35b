"""The summary is a claim, so it is checked: every job, in the database, against what was asked.

The rules do not depend on timing. A slow machine may see more requeues than planned; it must never see a
job lost, a job done twice, or a change without its event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import class_row

from reconciler.demo.scenario import Fate, Task
from reconciler.model import EventType
from reconciler.sql import query


@dataclass(frozen=True, slots=True)
class Account:
    """What became of the jobs. `faults` are broken promises, each with the job it is about."""

    done: int
    failed: int
    requeues: int
    fastest_sec: float | None
    slowest_sec: float | None
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """One job with what was produced and recorded about it; the columns of the query `account`."""

    job_table: str
    id: int
    status: str
    attempt_count: int
    attempts_refunded: int
    max_attempts: int
    fail_code: str | None
    fail_reason: str | None
    is_free: bool
    outputs: list[int]
    events: list[str]


def check(conn: psycopg.Connection[Any], tasks: Sequence[Task]) -> Account:
    """Hold the database against the tasks that were put into it."""
    with conn.cursor(row_factory=class_row(_Row)) as cursor:
        found = cursor.execute(query("demo", "account")).fetchall()
    rows = {f"{row.job_table}/{row.id}": row for row in found}
    faults = [fault for task in tasks for fault in _faults(task, rows.get(task.name))]
    known = {task.name for task in tasks}
    faults += [f"{name}: nobody asked for this job" for name in rows if name not in known]
    recovery = conn.execute(query("demo", "recovery").format()).fetchone()
    statuses = Counter(row.status for row in rows.values())
    requeues = sum(event == EventType.REQUEUED for row in rows.values() for event in row.events)
    fastest, slowest = recovery if recovery is not None else (None, None)
    return Account(statuses["done"], statuses["failed"], requeues, fastest, slowest, tuple(faults))


def _faults(task: Task, row: _Row | None) -> list[str]:
    if row is None:
        return [f"{task.name}: lost, the row is gone"]
    wrong = []
    expected = "failed" if task.fate is Fate.POISON else "done"
    if row.status != expected:
        wrong.append(f"is {row.status}, not {expected}")
    if not row.is_free:
        wrong.append("is still locked")
    requeues, failures = row.events.count(EventType.REQUEUED), row.events.count(EventType.FAILED_TIMEOUT)
    if len(row.events) != requeues + failures:
        wrong.append(f"has unexpected events: {row.events}")
    if row.status == "done":
        if row.outputs != [row.attempt_count]:
            wrong.append(f"was produced by attempts {row.outputs}, not once by attempt {row.attempt_count}")
        # Every run but the last ended in a requeue, and every requeue left its event.
        if (requeues, failures) != (row.attempt_count - 1, 0):
            wrong.append(
                f"ran {row.attempt_count} times, but has {requeues} requeues and {failures} failures"
            )
    if row.status == "failed":
        if row.outputs:
            wrong.append(f"failed, but was produced by attempts {row.outputs}")
        if (row.fail_code, row.fail_reason) != ("timeout", "lease_expired"):
            wrong.append(f"failed for another reason: {row.fail_code}, {row.fail_reason}")
        if row.attempt_count - row.attempts_refunded < row.max_attempts:
            wrong.append(f"failed after {row.attempt_count} of {row.max_attempts} attempts")
        if (requeues, failures) != (row.attempt_count - 1, 1):
            wrong.append(
                f"ran {row.attempt_count} times, but has {requeues} requeues and {failures} failures"
            )
    return [f"{task.name}: {what}" for what in wrong]
