"""`migrate --heartbeats=hot`: the other index set, there and back, and what it does to beats and claims."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from reconciler.database import Database
from reconciler.migrate import MigrationReport, migrate
from reconciler.model import Policy, Rulebook, TableSpec
from reconciler.report import PageRequest, Scan
from reconciler.shape import read_shape
from reconciler.store import PgStore
from reconciler.worker import claim_next, heartbeat_batch
from tests.factories import a_job, the_job
from tests.integration.schema_facts import storage, the_columns, the_indexes
from tests.integration.test_migrate_existing import PARTITIONED
from tests.postgres import Connection, wait_until

JOBS = (TableSpec("jobs", "jobs"),)
RUNNING = 200
ROUNDS = 20


@pytest.fixture
def app(empty_dsn: str) -> Iterator[Connection]:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        yield connection


def fillfactor(conn: Connection, table: str = "jobs") -> str | None:
    row = conn.execute(
        "select array_to_string(reloptions, ',') from pg_class where relname = %s", (table,)
    ).fetchone()
    assert row is not None
    options: str | None = row[0]
    return options


def hot_share(dsn: str, conn: Connection) -> float:
    """The share of HOT updates among beats, as the server itself counts them."""
    conn.execute("truncate jobs")
    conn.execute("insert into jobs (status) select 'done' from generate_series(1, 2000)")
    conn.execute("insert into jobs (status) select 'queued' from generate_series(1, %s)", (RUNNING,))
    # A session reports its statistics at the latest when it ends, so each part has a session of its own.
    with psycopg.connect(dsn, autocommit=True) as worker:
        claims = claim_next(worker, "jobs", "worker-1", limit=RUNNING)
    assert len(claims) == RUNNING
    conn.execute("vacuum jobs")  # what autovacuum does in time: the claims' old versions make room
    updates, hot = updates_so_far(conn, RUNNING)
    with psycopg.connect(dsn, autocommit=True) as worker:
        for _ in range(ROUNDS):
            heartbeat_batch(worker, claims)
    all_updates, all_hot = updates_so_far(conn, updates + RUNNING * ROUNDS)
    return (all_hot - hot) / (all_updates - updates)


def updates_so_far(conn: Connection, at_least: int) -> tuple[int, int]:
    """Updates and HOT updates, once the server has counted that many."""

    def counted() -> tuple[int, int] | None:
        conn.execute("select pg_stat_clear_snapshot()")
        row = conn.execute(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'jobs'"
        ).fetchone()
        return row if row is not None and row[0] >= at_least else None

    updates: tuple[int, int] = wait_until(counted, "the server's statistics did not arrive")
    return updates


@pytest.mark.every_postgres
def test_beats_are_never_hot_with_the_documents_indexes_and_nearly_always_with_the_other_set(
    dsn: str, conn: Connection
) -> None:
    assert hot_share(dsn, conn) == 0
    conn.execute("select pg_stat_reset()")
    migrate(dsn, heartbeats="hot")
    assert hot_share(dsn, conn) > 0.9


@pytest.mark.every_postgres
def test_the_other_set_replaces_the_documents_indexes_and_leaves_room_on_the_page(
    dsn: str, conn: Connection
) -> None:
    migrate(dsn, heartbeats="hot")
    for table in ("jobs", "asr_jobs"):
        assert the_indexes(conn, table) == {
            f"idx_{table}_processing": "btree (id) WHERE (status = 'processing'::text)",
            f"idx_{table}_queued": "btree (next_earliest_run_at, id) WHERE (status = 'queued'::text)",
        }
        assert fillfactor(conn, table) == "fillfactor=80"


def test_a_plain_run_keeps_the_chosen_set(dsn: str) -> None:
    migrate(dsn, heartbeats="hot")
    report = migrate(dsn)
    assert report.applied == ()
    assert dict(report.heartbeats) == {"public.jobs": "hot", "public.asr_jobs": "hot"}


def test_the_chosen_set_is_known_even_when_the_bookkeeping_is_lost(dsn: str, conn: Connection) -> None:
    migrate(dsn, heartbeats="hot")
    conn.execute("drop table reaper_migrations")
    assert migrate(dsn).applied == ("create table public.reaper_migrations",)


def test_switching_back_gives_the_documents_indexes_and_the_pages_as_before(
    dsn: str, conn: Connection
) -> None:
    before = the_indexes(conn)
    migrate(dsn, heartbeats="hot")
    migrate(dsn, heartbeats="default")
    assert the_indexes(conn) == before
    assert fillfactor(conn) in (None, "")
    assert migrate(dsn).applied == ()


@pytest.mark.parametrize(("mine", "hot", "back"), [(90, 80, 90), (70, 70, 70)])
def test_a_fillfactor_of_the_apps_own_comes_back_or_is_left(
    dsn: str, conn: Connection, mine: int, hot: int, back: int
) -> None:
    conn.execute(f"alter table jobs set (fillfactor = {mine})".encode())
    migrate(dsn, heartbeats="hot")
    assert fillfactor(conn) == f"fillfactor={hot}"
    migrate(dsn, heartbeats="default")
    assert fillfactor(conn) == f"fillfactor={back}"


def test_a_fillfactor_the_app_chose_after_the_switch_is_left(dsn: str, conn: Connection) -> None:
    migrate(dsn, heartbeats="hot")
    conn.execute("alter table jobs set (fillfactor = 60)")
    migrate(dsn, heartbeats="default")
    assert fillfactor(conn) == "fillfactor=60"


def test_an_index_on_status_and_heartbeat_goes_whatever_its_name(empty_dsn: str, app: Connection) -> None:
    app.execute("create table jobs (id uuid primary key, status text, last_heartbeat_at timestamptz)")
    app.execute("create index my_heartbeats on jobs (status, last_heartbeat_at)")
    assert "drop index my_heartbeats" in migrate(empty_dsn, JOBS, heartbeats="hot").applied
    assert "my_heartbeats" not in the_indexes(app)


@pytest.mark.parametrize(
    "definition",
    [
        "index mine on jobs (stage, last_heartbeat_at)",
        "index mine on jobs (stage) where lease_expires_at is not null",
        "index mine on jobs ((lease_expires_at is null))",
        "index mine on jobs (stage) include (lease_expires_at)",
        "unique index mine on jobs (status, last_heartbeat_at)",
    ],
)
def test_an_index_of_the_apps_own_that_spoils_hot_is_left_and_told(
    dsn: str, conn: Connection, definition: str
) -> None:
    conn.execute(f"create {definition}".encode())
    report: MigrationReport = migrate(dsn, heartbeats="hot")
    assert "mine" in the_indexes(conn)
    assert [text for text in report.warnings if "index mine of public.jobs holds" in text]


def test_indexes_that_do_not_touch_a_beat_are_not_complained_about(dsn: str, conn: Connection) -> None:
    conn.execute("create index fine on jobs (stage) include (attempt_count)")
    assert migrate(dsn, heartbeats="hot").warnings == ()


def test_a_fresh_database_can_start_with_the_other_set(empty_dsn: str, app: Connection) -> None:
    report = migrate(empty_dsn, heartbeats="hot")
    assert the_indexes(app).keys() == {"idx_jobs_processing", "idx_jobs_queued"}
    assert fillfactor(app) == "fillfactor=80"
    assert not any("status_lease" in title for title in report.applied)


@pytest.mark.every_postgres
def test_a_partitioned_table_can_switch_there_and_back(empty_dsn: str, app: Connection) -> None:
    app.execute(PARTITIONED)
    migrate(empty_dsn, JOBS)
    before = {table: the_indexes(app, table) for table in ("jobs", "jobs_old", "jobs_new", "jobs_new_a")}
    file = storage(app, "jobs_old")

    migrate(empty_dsn, JOBS, heartbeats="hot")
    assert the_indexes(app, "jobs_old").keys() == {"idx_jobs_old_processing", "idx_jobs_old_queued"}
    assert not any(text.startswith("INVALID") for text in the_indexes(app).values())
    assert fillfactor(app, "jobs_old") == fillfactor(app, "jobs_new_a") == "fillfactor=80"
    assert migrate(empty_dsn, JOBS).applied == ()

    migrate(empty_dsn, JOBS, heartbeats="default")
    assert {table: the_indexes(app, table) for table in before} == before
    assert fillfactor(app, "jobs_old") in (None, "")
    assert storage(app, "jobs_old") == file
    assert "attempts_refunded" in the_columns(app, "jobs_new_a")


@pytest.mark.parametrize("heartbeats", ["default", "hot"])
def test_passes_and_claims_find_their_rows_by_an_index_in_either_set(
    dsn: str, conn: Connection, heartbeats: str
) -> None:
    migrate(dsn, heartbeats="hot" if heartbeats == "hot" else "default")
    conn.execute("insert into jobs (status) select 'done' from generate_series(1, 20000)")
    conn.execute("insert into jobs (status) select 'queued' from generate_series(1, 20000)")
    stuck = a_job(conn)
    conn.execute("vacuum analyze jobs")
    conn.execute("select pg_stat_reset()")

    database = Database(dsn)
    store = PgStore(database, read_shape(conn, JOBS[0]), Policy())
    survey = store.survey()
    page = store.reap(PageRequest(Scan.EXPIRED, survey.as_of, 100), Rulebook())
    database.close()
    with psycopg.connect(dsn, autocommit=True) as worker:
        assert len(claim_next(worker, "jobs", "worker-2")) == 1

    assert page.changed == 1
    assert the_job(conn, stuck)["status"] == "queued"

    def scans() -> tuple[int, int] | None:
        conn.execute("select pg_stat_clear_snapshot()")
        row = conn.execute(
            "select idx_scan, seq_scan from pg_stat_user_tables where relname = 'jobs'"
        ).fetchone()
        return row if row is not None and row[0] else None

    index_scans, whole_reads = wait_until(scans, "the server's statistics did not arrive")
    assert index_scans > 0
    assert whole_reads == 0
