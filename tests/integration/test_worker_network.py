"""A network that swallows everything: connections stay open, nothing comes through, nobody says so."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from reconciler.worker import LeaseLostError, Worker, dispatch
from tests.factories import a_queued_job, the_job
from tests.postgres import Connection
from tests.worker_fleet import eventually, one, running, status_of
from tests.worker_settings import a_fast_sdk


class Wire:
    """A TCP proxy before the server's socket. While `swallowing`, bytes vanish and connections stay open."""

    def __init__(self, dsn: str) -> None:
        parts = conninfo_to_dict(dsn)
        self._target = f"{parts['host']}/.s.PGSQL.{parts.get('port') or 5432}"
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")
        self.swallowing = threading.Event()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._listener.settimeout(0.1)
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._forward, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as selector:
            server.connect(self._target)
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            dead = False
            while not self._closed.is_set():
                for key, _ in selector.select(0.05):
                    try:
                        data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    except ConnectionResetError:
                        return
                    if not data:
                        return
                    # A connection that lived through the silence stays dead: its stream has a hole.
                    dead = dead or self.swallowing.is_set()
                    if not dead:
                        key.data.sendall(data)

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()


@pytest.fixture
def wire(dsn: str) -> Iterator[Wire]:
    wire = Wire(dsn)
    yield wire
    wire.close()


def test_a_silent_network_fences_the_worker_in_time_and_it_works_again_afterwards(
    wire: Wire, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "CLAIM_LIMIT_SEC", 1.0)
    job = a_queued_job(conn, stage="held")
    stopped: list[tuple[float, BaseException | None]] = []

    def handle(context: Any) -> None:
        if context.stage == "held" and context.attempt == 1:
            context.cancelled.wait(60)
            stopped.append((time.monotonic(), context.reason))

    worker = Worker(wire.dsn, {"jobs": handle}, sdk=a_fast_sdk(lease_sec=3), poll_sec=0.2, worker_id="w")
    with running(worker):
        eventually(lambda: status_of(conn, job) == "processing")
        eventually(lambda: one(conn, "select last_heartbeat_at > processing_started_at from jobs"))
        wire.swallowing.set()
        silent = time.monotonic()
        eventually(lambda: stopped, timeout=15)
        assert isinstance(stopped[0][1], LeaseLostError)
        assert stopped[0][0] - silent < 3, "before the lease of 3 s could end"
        assert the_job(conn, job)["status"] == "processing"
        wire.swallowing.clear()
        eventually(lambda: one(conn, "select lease_expires_at <= now() from jobs"), "its lease is ended")
        later = a_queued_job(conn)
        eventually(lambda: status_of(conn, later) == "done", "hung connections are given up", timeout=60)


def test_the_wire_itself_works(wire: Wire) -> None:
    with psycopg.connect(wire.dsn) as conn:
        assert one(conn, "select 1") == 1
