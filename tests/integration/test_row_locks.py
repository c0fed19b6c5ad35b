"""Which locks of others a pass respects, and which it does not wait for."""

from __future__ import annotations

from reconciler.reaper import Reaper
from reconciler.report import PassReport
from tests.factories import a_job, the_job
from tests.postgres import Connection


def _one_pass(dsn: str) -> PassReport:
    with Reaper(dsn, env={}) as reaper:
        return reaper.run_once()


def test_a_row_that_somebody_edits_is_skipped_and_taken_by_the_next_pass(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    job = a_job(conn)
    with other_conn.transaction():
        other_conn.execute("update jobs set stage = 'clip' where id = %s", (job,))
        report = _one_pass(dsn)
        assert report.ok
        assert report.tables["jobs"].counts["requeued"] == 0
        assert report.tables["jobs"].counts["moved_on"] == 1
    assert _one_pass(dsn).tables["jobs"].requeued_ids == [str(job)]


def test_a_hung_workers_open_transaction_that_refers_to_its_job_does_not_hide_the_job(
    dsn: str, conn: Connection, other_conn: Connection
) -> None:
    conn.execute("create table progress (job_id uuid references jobs (id), pct int)")
    job = a_job(conn)
    with other_conn.transaction():
        other_conn.execute("insert into progress values (%s, 42)", (job,))
        report = _one_pass(dsn)
    assert report.tables["jobs"].requeued_ids == [str(job)]
    assert the_job(conn, job)["status"] == "queued"
