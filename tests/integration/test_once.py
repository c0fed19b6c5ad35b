"""`job-reaper once` as the CronJob runs it: a process, an exit code, one JSON object, a log."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from psycopg.rows import dict_row

from tests.factories import a_job, the_events, the_job
from tests.postgres import Connection
from tests.reaping import by_status, count_of, ended, many_expired, once, one_pass, started

COUNTS = {"requeued", "failed", "deferred", "moved_on", "not_due", "unleased", "poisoned"}


def everything(conn: Connection) -> list[object]:
    """All rows of all tables a pass could write to."""
    rows: list[object] = []
    with conn.cursor(row_factory=dict_row) as cursor:
        for table in ("jobs", "asr_jobs", "job_events", "reaper_state"):
            rows += cursor.execute(f"select * from {table} order by 1".encode()).fetchall()
    return rows


# ── the object ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.every_postgres
def test_the_json_object_is_the_one_of_the_interface(dsn: str, conn: Connection) -> None:
    requeued, failed = a_job(conn), a_job(conn, attempt=3)
    a_job(conn, due_age=-60)
    a_job(conn, lease_age=None, beat_age=None, start_age=None)
    done = once(dsn)
    assert done.code == 0
    document = done.json
    assert set(document) == {"ok", "dry_run", "skipped", "pass_ms", "tables", "totals"}
    assert (document["ok"], document["dry_run"], document["skipped"]) == (True, False, None)
    assert isinstance(document["pass_ms"], float)
    assert list(document["tables"]) == ["jobs", "asr_jobs"]
    for table in document["tables"].values():
        lists = ("requeued", "failed", "deferred", "poisoned")
        assert set(table) == {"ok", *lists, "counts", "error", "scan_ms"}
        assert all(isinstance(table[name], list) for name in lists)
        assert set(table["counts"]) == COUNTS
        assert isinstance(table["scan_ms"], float)
        assert (table["ok"], table["error"]) == (True, None)
    jobs = document["tables"]["jobs"]
    assert (jobs["requeued"], jobs["failed"]) == ([str(requeued)], [str(failed)])
    assert jobs["counts"] == {
        **dict.fromkeys(COUNTS, 0),
        "requeued": 1,
        "failed": 1,
        "not_due": 1,
        "unleased": 1,
    }
    assert document["totals"] == [
        {"table": "jobs", "outcome": "failed", "stage": None, "reason": "lease_expired", "count": 1},
        {"table": "jobs", "outcome": "requeued", "stage": None, "reason": "lease_expired", "count": 1},
    ]


def test_stdout_holds_the_report_and_stderr_only_json_lines(dsn: str, conn: Connection) -> None:
    job = a_job(conn, stage="clip")
    done = once(dsn)
    assert len(done.stdout.splitlines()) == 1
    (line,) = done.said("job requeued")
    assert (line["table"], line["id"], line["reason"], line["locked_by"]) == (
        "jobs",
        str(job),
        "lease_expired",
        "worker-1",
    )
    assert (line["stage"], line["attempt"], line["max_attempts"], line["verdict"]) == (
        "clip",
        1,
        3,
        "UNKNOWN",
    )
    (summary,) = done.said("pass done")
    assert summary["tables"]["jobs"]["requeued"] == 1
    assert all({"at", "level", "msg"} <= set(line) for line in done.log)


def test_the_text_report_is_for_people(dsn: str, conn: Connection) -> None:
    a_job(conn)
    done = ended(started(dsn, "once"))
    assert done.code == 0
    assert done.stdout.splitlines()[0].startswith("jobs: 1 requeued, 0 failed (")


# ── dry run ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_a_dry_run_changes_nothing_and_says_what_the_real_run_then_does(
    dsn: str, conn: Connection, way: str
) -> None:
    for table in ("jobs", "asr_jobs"):
        many_expired(conn, 30, table)
        many_expired(conn, 20, table, attempt=3)
        a_job(conn, table, lease_age=None)
        a_job(conn, table, lease_age=-(10**8))
        a_job(conn, table, due_age=-60)
    before = everything(conn)
    small = {"REAPER_BATCH_SIZE": "7"}
    dry = once(dsn, "--dry-run", **small) if way == "flag" else once(dsn, REAPER_DRY_RUN="true", **small)
    assert everything(conn) == before
    assert (dry.code, dry.json["dry_run"]) == (0, True)
    assert len(dry.said("job would be requeued")) == 64
    assert dry.said("job requeued") == []
    real = once(dsn, **small)
    for name, table in real.json["tables"].items():
        said = dry.json["tables"][name]
        assert said["counts"] == table["counts"]
        for outcome in ("requeued", "failed", "deferred"):
            assert sorted(said[outcome]) == sorted(table[outcome])


def test_a_dry_run_needs_no_turn_of_its_own(dsn: str, conn: Connection) -> None:
    conn.execute(
        "insert into reaper_state (scope, holder, until)"
        " values ('pass:asr_jobs,jobs', 'other', now() + interval '1 h')"
    )
    a_job(conn)
    assert once(dsn, "--dry-run").json["tables"]["jobs"]["counts"]["requeued"] == 1


# ── turns ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_pass_that_another_reaper_runs_is_skipped_and_said_so(dsn: str, conn: Connection) -> None:
    job = a_job(conn)
    conn.execute(
        "insert into reaper_state (scope, holder, until)"
        " values ('pass:asr_jobs,jobs', 'node-7/1', now() + interval '1 h')"
    )
    done = once(dsn)
    assert done.code == 0
    assert done.json["ok"]
    assert "node-7/1" in done.json["skipped"]
    assert done.json["tables"] == {}
    assert done.said("pass skipped")[0]["why"] == done.json["skipped"]
    assert the_job(conn, job)["status"] == "processing"


# ── exit codes (2 is in test_bad_input.py) ──────────────────────────────────────────────────────────


def test_a_table_that_fails_is_exit_1_and_a_brake_is_exit_3(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("brake: {maxExpiredShare: 0.5}\n")
    job = a_job(conn)
    braked = once(dsn, REAPER_CONFIG=str(config))
    assert braked.code == 3
    assert braked.json["tables"]["jobs"]["deferred"] == [str(job)]
    conn.execute("alter table asr_jobs drop stage")
    assert once(dsn, REAPER_CONFIG=str(config)).code == 1, "an error outweighs a brake"


# ── what it loads ───────────────────────────────────────────────────────────────────────────────────


def test_one_pass_loads_neither_the_operator_nor_what_it_does_not_use(dsn: str) -> None:
    done = ended(started(dsn, "once", python=("-X", "importtime")))
    assert done.code == 0
    loaded = {
        line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line
    }
    assert "psycopg" in loaded
    unwanted = {
        "kopf",
        "kubernetes",
        "prometheus_client",
        "yaml",
        "click",
        "pydantic_settings",
        "http",
    }
    assert loaded & unwanted == set()


# ── the log of a large pass (SPEC.md decision 14) ───────────────────────────────────────────────────


def test_the_first_thousand_jobs_are_told_one_by_one_the_rest_by_holder_and_reason(
    dsn: str, conn: Connection
) -> None:
    many_expired(conn, 1200, holder="worker-1")
    many_expired(conn, 300, holder="worker-2", attempt=3)
    done = once(dsn)
    table = done.json["tables"]["jobs"]
    assert (table["counts"]["requeued"], table["counts"]["failed"]) == (1200, 300)
    one_by_one = done.said("job requeued") + done.said("job failed")
    assert len(one_by_one) == 1000
    assert len({line["id"] for line in one_by_one}) == 1000
    sums = done.said("jobs requeued") + done.said("jobs failed")
    assert sum(line["jobs"] for line in sums) == 500
    keys = [(line["msg"], line["locked_by"], line["reason"]) for line in sums]
    assert len(set(keys)) == len(keys) <= 2
    assert len(table["requeued"]) <= 1000
    assert len(table["failed"]) <= 1000
    assert len(done.said("pass done")) == 1
    assert count_of(conn, "select count(*) from job_events") == 1500, "the events are the full record"


# ── Pushgateway ─────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def a_gateway(answer: bytes = b"HTTP/1.0 200 OK\r\n\r\n") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A Pushgateway on the loopback: its address, and the (path, body) of each push."""
    pushes: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            pushes.append((self.path, body))
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            """Not news."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", pushes
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_metrics_are_pushed_when_a_gateway_is_configured(
    dsn: str, conn: Connection, tmp_path: Path
) -> None:
    a_job(conn, stage="clip")
    with a_gateway() as (url, pushes):
        config = tmp_path / "config.yaml"
        config.write_text(json.dumps({"metrics": {"pushgateway": url}}))
        assert once(dsn, REAPER_CONFIG=str(config)).code == 0
        ((path, body),) = pushes
    assert path == "/metrics/job/job-reaper"
    assert 'reaper_requeues_total{reason="lease_expired",stage="clip",table="jobs"} 1.0' in body
    assert "reaper_last_success_timestamp_seconds" in body


@pytest.mark.parametrize("answer", [b"HTTP/1.0 500 no\r\n\r\n", b"garbage\r\n\r\n", b""])
def test_a_gateway_that_fails_does_not_make_the_pass_look_failed(
    dsn: str, conn: Connection, tmp_path: Path, answer: bytes
) -> None:
    job = a_job(conn)
    with a_gateway(answer) as (url, _):
        config = tmp_path / "config.yaml"
        config.write_text(json.dumps({"metrics": {"pushgateway": url}}))
        done = once(dsn, REAPER_CONFIG=str(config))
    assert done.code == 0
    assert len(done.said("push to the Pushgateway failed")) == 1
    assert the_job(conn, job)["status"] == "queued"


def test_nothing_to_do_is_said_in_one_line(dsn: str, conn: Connection) -> None:
    a_job(conn, lease_age=-60)
    done = once(dsn)
    assert [line["msg"] for line in done.log] == ["pass done"]
    assert by_status(conn) == {"processing": 1}
    assert the_events(conn) == []
    assert one_pass(dsn).ok
