"""The first process of a node, seen without a namespace: it answers, whoever else connects."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.assets import REPOSITORY
from tests.cluster.process import wait_until

SERVE = """
import sys
from pathlib import Path
from tests.cluster import supervisor
supervisor.ASKER_SECONDS = 0.5
supervisor.Supervisor(Path(sys.argv[1])).serve()
"""


@pytest.fixture
def control() -> Iterator[Path]:
    # Not below tmp_path: the path of a socket may have 107 bytes only.
    with (
        tempfile.TemporaryDirectory(prefix="supervisor-") as directory,
        subprocess.Popen([sys.executable, "-c", SERVE, directory], cwd=REPOSITORY) as running,
    ):
        try:
            found = Path(directory) / "control"
            wait_until(found.exists, timeout=20, what="the supervisor")
            yield found
        finally:
            running.terminate()
            running.wait(10)


def connected(control: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(str(control))
    return connection


def ask(control: Path, **command: str) -> dict[str, object]:
    with connected(control) as connection, connection.makefile("rwb") as stream:
        stream.write(json.dumps(command).encode() + b"\n")
        stream.flush()
        return dict(json.loads(stream.readline()))


def test_a_connection_that_says_nothing_holds_nobody_up(control: Path) -> None:
    with connected(control):
        assert ask(control, do="status") == {"pids": {}, "exits": {}}


def test_a_bad_command_is_answered_with_its_error(control: Path) -> None:
    assert "unknown command" in str(ask(control, do="dance", name="x")["error"])
    assert ask(control, do="status") == {"pids": {}, "exits": {}}
