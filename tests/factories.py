"""Rows for tests: plain functions with defaults, and a reader for each thing they make.

Ages are seconds before Postgres' now(); a negative age lies in the future, None is NULL.
"""

from __future__ import annotations

from typing import Any

from psycopg import sql
from psycopg.rows import dict_row

from tests.postgres import Connection


def a_job(
    conn: Connection,
    table: str = "jobs",
    *,
    status: str = "processing",
    locked_by: str | None = "worker-1",
    lease_age: float | None = 60.0,
    beat_age: float | None = 360.0,
    start_age: float | None = 600.0,
    attempt: int | None = 1,
    max_attempts: int | None = 3,
    refunded: int = 0,
    stage: str | None = None,
    expected_ms: int | None = None,
    due_age: float | None = None,
    id: Any = None,  # noqa: A002 - it is the column's name, like every other keyword here
    **columns: Any,
) -> Any:
    """Insert one job and return its id. By default: claimed 10 min ago, silent for 6, expired for 1.

    `columns` are further columns of the app's own (payload, tenant, …).
    """
    values = {
        "status": status,
        "locked_by": locked_by,
        "lease_expires_at": _ago(lease_age),
        "last_heartbeat_at": _ago(beat_age),
        "processing_started_at": _ago(start_age),
        "next_earliest_run_at": _ago(due_age),
        "attempt_count": attempt,
        "max_attempts": max_attempts,
        "attempts_refunded": refunded,
        "stage": stage,
        "expected_duration_ms": expected_ms,
        **({} if id is None else {"id": id}),
        **columns,
    }
    statement = sql.SQL("insert into {} ({}) values ({}) returning id").format(
        _identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, values)),
        sql.SQL(", ").join(
            value if isinstance(value, sql.Composable) else sql.Literal(value) for value in values.values()
        ),
    )
    row = conn.execute(statement).fetchone()
    assert row is not None
    return row[0]


def a_queued_job(conn: Connection, table: str = "jobs", **columns: Any) -> Any:
    """Insert one job that nobody has claimed yet and return its id."""
    unclaimed = {"locked_by": None, "lease_age": None, "beat_age": None, "start_age": None, "attempt": 0}
    return a_job(conn, table, status="queued", **(unclaimed | columns))


def the_job(conn: Connection, job_id: Any, table: str = "jobs") -> dict[str, Any]:
    """The whole row. Fails when it is gone: a lost job is never an empty answer."""
    statement = sql.SQL("select * from {} where id = {}").format(_identifier(table), sql.Placeholder())
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(statement, (job_id,)).fetchone()
    assert row is not None, f"no row {job_id} in {table}"
    return row


def the_events(conn: Connection, job_id: Any = None, events: str = "job_events") -> list[dict[str, Any]]:
    """The `data` of one job's events (or of all events) in the order they were written."""
    statement = sql.SQL(
        "select data from {} where {} or job_id::text = {} order by data ->> 'at', ctid"
    ).format(_identifier(events), sql.Literal(job_id is None), sql.Literal(str(job_id)))
    return [data for (data,) in conn.execute(statement)]


def _ago(age: float | None) -> sql.Composable | None:
    # now() is Postgres' own: no test depends on this machine's clock agreeing with the server's.
    return None if age is None else sql.SQL("now() - make_interval(secs => {})").format(sql.Literal(age))


def _identifier(name: str) -> sql.Identifier:
    return sql.Identifier(*name.split(".")) if name.count(".") == 1 else sql.Identifier(name)
