"""`migrate` beside a living app: locks, rivals, kills, poolers. No step may stop the app or be lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from reconciler.errors import MigrationError
from reconciler.migrate import DEFAULT_TABLES, Patience, migrate
from reconciler.migrate_session import LOCK_KEY
from reconciler.model import TableSpec
from tests.integration.schema_facts import fingerprint, the_columns, the_indexes
from tests.integration.test_migrate_existing import PARTITIONED
from tests.postgres import Connection, running_pgbouncer, wait_until

JOBS = (TableSpec("jobs", "jobs"),)
HASTY = Patience(lock_timeout_ms=50, tries=3, first_pause_sec=0.01, rival_sec=0.2)
STEADY = Patience(lock_timeout_ms=50, tries=200, first_pause_sec=0.01, longest_pause_sec=0.05)

APP = """
create table jobs (id uuid primary key default gen_random_uuid(), status text not null default 'queued',
                   last_heartbeat_at timestamptz, attempt_count int not null default 0,
                   processing_started_at timestamptz);
insert into jobs (status) select 'done' from generate_series(1, 20000);
insert into jobs (status) select 'queued' from generate_series(1, 200);
"""


@pytest.fixture
def app(empty_dsn: str) -> Iterator[Connection]:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        yield connection


# ── the app goes on ─────────────────────────────────────────────────────────────────────────────────


class OldWorker(threading.Thread):
    """A worker of the 002 generation: claims, beats, recovers and finishes by the document's statements."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self.dsn = dsn
        self.stopping = threading.Event()
        self.beats = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with psycopg.connect(self.dsn, autocommit=True) as conn:
                # An app's patience: whatever blocks it longer than this is an outage to its users.
                conn.execute("set statement_timeout = '3s'")
                while not self.stopping.is_set():
                    self._work(conn)
        except Exception as error:  # noqa: BLE001 - a thread hands its failure to the test
            self.error = error

    def _work(self, conn: Connection) -> None:
        row = conn.execute(
            "update jobs set status = 'processing', processing_started_at = now(), last_heartbeat_at = now()"
            " where id = (select id from jobs where status = 'queued' limit 1 for update skip locked)"
            " and status = 'queued' returning id"
        ).fetchone()
        assert row is not None
        conn.execute("update jobs set last_heartbeat_at = now() where id = any(%s)", ([row[0]],))
        conn.execute(
            "update jobs set status = 'queued', attempt_count = attempt_count + 1 where status = 'processing'"
            " and now() - last_heartbeat_at > interval '300 seconds' and attempt_count < 3"
        )
        conn.execute("update jobs set status = 'queued' where id = %s", row)
        conn.execute("insert into jobs (status) values ('done')")
        self.beats += 1


@contextmanager
def old_workers(dsn: str, number: int = 2) -> Iterator[list[OldWorker]]:
    workers = [OldWorker(dsn) for _ in range(number)]
    for worker in workers:
        worker.start()
    wait_until(lambda: all(worker.beats or worker.error for worker in workers))
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stopping.set()
            worker.join(10)


@pytest.mark.every_postgres
def test_workers_of_the_002_generation_keep_working_throughout(empty_dsn: str, app: Connection) -> None:
    app.execute(APP)
    with old_workers(empty_dsn) as workers:
        for heartbeats in (None, "hot", "default"):
            before = [worker.beats for worker in workers]
            migrate(empty_dsn, JOBS, heartbeats=heartbeats, patience=STEADY)
            wait_until(lambda: all(w.error or w.beats > n for w, n in zip(workers, before, strict=True)))  # noqa: B023
    assert [worker.error for worker in workers] == [None, None]
    assert the_indexes(app)["idx_jobs_status_lease"] == "btree (status, lease_expires_at)"


def test_a_busy_table_is_left_alone_between_tries(empty_dsn: str, app: Connection) -> None:
    app.execute(APP)
    said: list[str] = []
    released = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if "others hold a lock" in text and not released.is_set():
            # While we pause, a beat goes straight through: no ALTER TABLE waits in front of it.
            with psycopg.connect(empty_dsn, autocommit=True) as worker:
                worker.execute("set lock_timeout = '1ms'")
                worker.execute("update jobs set last_heartbeat_at = now() where status = 'queued'")
            if sum("others hold" in line for line in said) == 3:
                holder.rollback()
                released.set()

    # The old worker gives up after 3 s: an ALTER TABLE that waited longer than that would stop it.
    with psycopg.connect(empty_dsn) as holder, old_workers(empty_dsn, 1) as workers:
        holder.execute("select 1 from jobs limit 1")
        report = migrate(empty_dsn, JOBS, say=say, patience=STEADY)
    assert workers[0].error is None
    assert sum("others hold a lock" in line for line in said) == 3
    assert "add 9 columns to public.jobs" in report.applied


def test_a_lock_that_never_comes_ends_the_run_with_advice(empty_dsn: str, app: Connection) -> None:
    app.execute(APP)
    with psycopg.connect(empty_dsn, application_name="nightly export") as holder:
        holder.execute("select 1 from jobs limit 1")
        with pytest.raises(MigrationError, match=r"no lock after 3 tries.*run migrate again") as caught:
            migrate(empty_dsn, JOBS, patience=HASTY)
    assert caught.value.code == "lock_timeout"
    assert "lease_expires_at" not in the_columns(app)
    assert "add 9 columns to public.jobs" in migrate(empty_dsn, JOBS).applied


def test_a_role_with_a_short_statement_timeout_can_still_migrate(empty_dsn: str, app: Connection) -> None:
    app.execute(APP)
    app.execute(f"alter database {app.info.dbname} set statement_timeout = '5ms'".encode())
    migrate(empty_dsn, JOBS)


# ── rivals ──────────────────────────────────────────────────────────────────────────────────────────


def test_two_migrators_at_once_do_each_step_once(empty_dsn: str, app: Connection) -> None:
    app.execute(APP)
    barrier = threading.Barrier(2)
    reports: list[Any] = []

    def run() -> None:
        barrier.wait()
        try:
            reports.append(migrate(empty_dsn, patience=STEADY).applied)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            reports.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    loser, winner = sorted(reports, key=len)
    assert loser == ()
    assert "create index idx_jobs_status_lease" in winner


def test_a_rival_that_does_not_end_is_named(dsn: str, conn: Connection) -> None:
    conn.execute("set application_name = 'the other one'")
    conn.execute("select pg_advisory_lock(%s)", (LOCK_KEY,))
    said: list[str] = []
    with pytest.raises(MigrationError, match=rf"pid {conn.info.backend_pid}, the other one") as caught:
        migrate(dsn, patience=HASTY, say=said.append)
    assert caught.value.code == "locked"
    assert len(said) == 1


def test_the_lock_is_given_back(dsn: str, conn: Connection) -> None:
    migrate(dsn)
    assert conn.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone() == (0,)


# ── kills ───────────────────────────────────────────────────────────────────────────────────────────

KILLED = """
import os, signal, sys
from reconciler.migrate import migrate
from reconciler.model import TableSpec
dsn, *choices = sys.argv[1:]

def run(choice, steps):
    def say(text):
        nonlocal steps
        if steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        steps -= 1
    migrate(dsn, [TableSpec("jobs", "jobs")], heartbeats=choice, say=say)
    os._exit(0)

kills = 0
while True:
    child = os.fork()
    if child == 0:
        run(choices[0] if kills == 0 and choices else None, 0 if kills == 0 else 1)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert status == signal.SIGKILL and kills < 100, status
    kills += 1
print(kills)
"""


def killed_again_and_again(dsn: str, *choice: str) -> int:
    """Run migrate in processes that are killed (SIGKILL) one step after another; the answer counts the kills.

    The first one dies before its first step, each later one does a single step. Only the first is told
    the choice of the index set.
    """
    command = [sys.executable, "-c", KILLED, dsn, *choice]
    return int(subprocess.run(command, check=True, timeout=100, capture_output=True).stdout)


@pytest.mark.parametrize(
    "setup", [b"", APP.encode(), PARTITIONED.encode()], ids=["empty", "plain", "partitioned"]
)
def test_a_run_killed_before_any_step_is_finished_by_the_next(
    empty_dsn: str, app: Connection, setup: bytes
) -> None:
    if setup:
        app.execute(setup)
    assert killed_again_and_again(empty_dsn) > 5
    assert migrate(empty_dsn, JOBS).applied == ()
    for table in [row[0] for row in app.execute("select relid::text from pg_partition_tree('jobs')")] or [
        "jobs"
    ]:
        assert len(the_indexes(app, table)) == 3
        assert not any(text.startswith("INVALID") for text in the_indexes(app, table).values())


def test_a_killed_switch_of_the_index_set_is_finished_by_a_plain_run(dsn: str, conn: Connection) -> None:
    assert killed_again_and_again(dsn, "hot") > 3
    assert the_indexes(conn).keys() == {"idx_jobs_processing", "idx_jobs_queued"}


@pytest.mark.every_postgres
def test_an_invalid_index_of_a_killed_build_is_dropped_and_built_anew(
    empty_dsn: str, app: Connection
) -> None:
    app.execute(APP)
    migrate(empty_dsn, JOBS)
    app.execute("drop index idx_jobs_status_lease")
    with psycopg.connect(empty_dsn) as old:
        old.execute("insert into jobs (status) values ('done')")  # CONCURRENTLY has to wait for this
        process = subprocess.Popen([sys.executable, "-c", UNHURT, empty_dsn])
        try:
            row = wait_until(lambda: app.execute(BUILDING).fetchone(), "no index build was seen waiting")
        finally:
            process.kill()
            process.wait(10)
        app.execute("select pg_terminate_backend(%s)", row)
        wait_until(lambda: not app.execute(BUILDING).fetchone())
    left = [name for name, text in the_indexes(app).items() if text.startswith("INVALID")]
    assert left, "the test did not produce what it is about"

    report = migrate(empty_dsn, JOBS)

    assert f"drop invalid index {left[0]}" in report.applied
    assert not any(text.startswith("INVALID") for text in the_indexes(app).values())
    assert len(the_indexes(app)) == 3


UNHURT = """
import sys
from reconciler.migrate import DEFAULT_TABLES, migrate
migrate(sys.argv[1], DEFAULT_TABLES[:1])
"""

BUILDING = """
select pid from pg_stat_progress_create_index
where datname = current_database() and phase like 'waiting for%' and lockers_total > 0
"""


def test_a_build_that_gave_up_waiting_is_started_again(empty_dsn: str, app: Connection) -> None:
    app.execute(APP)
    app.execute("alter table jobs add lease_expires_at timestamptz, add next_earliest_run_at timestamptz")
    migrate(empty_dsn, JOBS, patience=STEADY)
    app.execute("drop index idx_jobs_status_lease")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "others hold a lock" in text:
            old.rollback()

    with psycopg.connect(empty_dsn) as old:
        old.execute("insert into jobs (status) values ('done')")
        patience = Patience(concurrent_timeout_ms=200, first_pause_sec=0.01)
        report = migrate(empty_dsn, JOBS, patience=patience, say=say)
    assert any("others hold a lock" in text for text in said)
    assert report.applied[-1] == "create index idx_jobs_status_lease"
    assert the_indexes(app)["idx_jobs_status_lease"] == "btree (status, lease_expires_at)"


def test_a_server_that_ends_our_session_says_run_again(empty_dsn: str, app: Connection) -> None:
    app.execute(APP)

    def say(text: str) -> None:
        if text == "create index idx_jobs_status_lease":
            app.execute("select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory'")

    with pytest.raises(MigrationError, match="connection was lost; run migrate again") as caught:
        migrate(empty_dsn, JOBS, say=say)
    assert caught.value.code == "connection_lost"
    assert migrate(empty_dsn, JOBS).applied[0] == "create index idx_jobs_status_lease"


# ── poolers ─────────────────────────────────────────────────────────────────────────────────────────


def test_pgbouncer_in_transaction_mode_is_found_out_before_anything_is_changed(
    empty_dsn: str, app: Connection
) -> None:
    before = fingerprint(app)
    with (
        running_pgbouncer(empty_dsn) as bouncer,
        pytest.raises(MigrationError, match="transaction mode") as caught,
    ):
        migrate(bouncer.dsn)
    assert caught.value.code == "pooler"
    assert fingerprint(app) == before


def test_pgbouncer_in_session_mode_works(empty_dsn: str, app: Connection) -> None:
    with running_pgbouncer(empty_dsn, pool_mode="session", pool_size=1) as bouncer:
        migrate(bouncer.dsn)
    assert len(the_indexes(app)) == 3


def test_a_dry_run_works_through_any_pooler(empty_dsn: str) -> None:
    with running_pgbouncer(empty_dsn) as bouncer:
        assert migrate(bouncer.dsn, DEFAULT_TABLES, dry_run=True).sql
