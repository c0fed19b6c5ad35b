"""What a worker counts, and how rarely it complains."""

from __future__ import annotations

import threading
import time
import urllib.request

import pytest

from reconciler.worker import Claim, Worker, claim_job
from reconciler.worker import metrics as counted
from reconciler.worker.beater import Beater
from reconciler.worker.keeper import Keeper
from tests.factories import a_queued_job
from tests.postgres import Connection
from tests.worker_fleet import eventually, one, running
from tests.worker_settings import a_fast_sdk


def test_heartbeat_on_failure_log_once_and_backoff(caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper()
    keeper.hold(
        Claim("jobs", 1, "w", 1, None, 300.0), sent_at=time.monotonic(), budget_sec=None, cancel=print
    )
    beater = Beater("host=127.0.0.1 port=1", keeper, a_fast_sdk(lease_sec=300, beat_sec=15))
    before = counted.HEARTBEAT_FAILURES.value()
    pauses = []
    for _ in range(8):
        assert not beater.beat_once()
        pauses.append(beater._pause_sec())
    assert counted.HEARTBEAT_FAILURES.value() == before + 8
    assert caplog.text.count("heartbeat failed, trying again") == 1
    assert pauses == sorted(pauses)
    assert pauses[0] < 1
    assert pauses[-1] == 15


def test_the_documents_metrics_count_what_they_say(dsn: str, conn: Connection) -> None:
    job = a_queued_job(conn)
    conflicts, beats = counted.ACQUIRE_CONFLICTS.value(), counted.HEARTBEATS.value()
    let_go = threading.Event()
    worker = Worker(
        dsn, {"jobs": lambda _: let_go.wait(60)}, sdk=a_fast_sdk(lease_sec=1), poll_sec=0.1, metrics_port=0
    )
    with running(worker):
        eventually(lambda: counted.CONCURRENT_JOBS.value() == 1)
        assert claim_job(conn, "jobs", job, "another", sdk=a_fast_sdk()) is None
        assert counted.ACQUIRE_CONFLICTS.value() == conflicts + 1
        eventually(lambda: counted.HEARTBEATS.value() >= beats + 2)
        shown = urllib.request.urlopen(f"http://127.0.0.1:{worker.metrics_port}/metrics").read().decode()
        assert "worker_concurrent_jobs 1.0" in shown
        let_go.set()
        eventually(lambda: one(conn, "select status = 'done' from jobs"))
        eventually(lambda: counted.CONCURRENT_JOBS.value() == 0)
