"""The guard around the unit tests holds."""

from __future__ import annotations

import socket

import psycopg
import pytest


def test_a_unit_test_cannot_open_a_socket() -> None:
    with socket.socket() as client, pytest.raises(pytest.fail.Exception, match="opened a connection"):
        client.connect(("127.0.0.1", 1))


def test_a_unit_test_cannot_reach_a_database() -> None:
    with pytest.raises(pytest.fail.Exception, match="opened a connection"):
        psycopg.connect("postgresql:///postgres")
