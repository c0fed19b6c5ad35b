"""Unit tests are pure: whoever opens a connection here is in the wrong directory."""

from __future__ import annotations

import socket
from typing import Any, NoReturn

import psycopg
import pytest


def _refuse(*_: Any, **__: Any) -> NoReturn:
    pytest.fail("a unit test opened a connection: move it to tests/integration or tests/kube")


@pytest.fixture(autouse=True)
def _no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", _refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", _refuse)
    # libpq connects in C, below Python's sockets.
    monkeypatch.setattr(psycopg, "connect", _refuse)
    monkeypatch.setattr(psycopg.Connection, "connect", _refuse)
    monkeypatch.setattr(psycopg.AsyncConnection, "connect", _refuse)
