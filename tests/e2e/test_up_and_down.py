"""`make cluster-up` and `make cluster-down`: whatever happens on the way up, down leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster import assets, traces
from tests.cluster.assets import REPOSITORY
from tests.cluster.plugin import unavailable
from tests.cluster.preflight import node_tier_lacks
from tests.cluster.process import wait_until
from tests.cluster.sandbox import STATE_FILE, SandboxState

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(600)]


@pytest.fixture
def home() -> Iterator[Path]:
    """A memory and a temporary directory of our own, with the machine's programs and images.

    Not below tmp_path: the path of a socket may have 107 bytes only.
    """
    reasons = node_tier_lacks()
    if reasons:
        unavailable("node tier", "; ".join(reasons))
    directory = Path(tempfile.mkdtemp(prefix="up-"))
    (directory / "cache").mkdir()
    (directory / "tmp").mkdir()
    for entry in assets.cache_root().iterdir():
        if entry.name != "cluster-up":
            (directory / "cache" / entry.name).symlink_to(entry)
    yield directory
    command(directory, "down").communicate(timeout=120)
    left = the_node(directory)
    if left is not None:
        # A test that failed because `down` did not find the node must not leave it either.
        left.destroy()
    shutil.rmtree(directory)


def command(home: Path, word: str) -> subprocess.Popen[str]:
    places: Mapping[str, str] = {"JOB_REAPER_CACHE": str(home / "cache"), "TMPDIR": str(home / "tmp")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster", word],
        cwd=REPOSITORY,
        env={**os.environ, **places},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(home: Path, word: str) -> str:
    running = command(home, word)
    output = running.communicate(timeout=400)[0]
    assert running.returncode == 0, output
    return output


def the_node(home: Path) -> SandboxState | None:
    for found in (home / "tmp").glob(f"*/{STATE_FILE}"):
        return SandboxState.load(found.parent)
    return None


def namespaces_when_it_runs(home: Path) -> tuple[Path, frozenset[str]]:
    """Wait for the node's first process; returns its directory and namespaces."""

    def runs() -> bool:
        state = the_node(home)
        return state is not None and "node" in state.pids

    wait_until(runs, timeout=120, what="the node's first process")
    state = the_node(home)
    assert state is not None
    return Path(state.directory), traces.namespaces_of(state.pids["node"].number)


def test_up_stays_up_and_down_leaves_the_machine_as_it_was(home: Path) -> None:
    before = traces.machine_state()

    printed = finished(home, "up")
    directory, namespaces = namespaces_when_it_runs(home)
    config = f"export KUBECONFIG={directory / 'admin.kubeconfig'}"
    kubectl = next(line for line in printed.splitlines() if line.startswith("export PATH=")).split('"')[1]
    nodes = subprocess.run(
        [kubectl.partition(":")[0] + "/kubectl", "get", "nodes"],
        env={"KUBECONFIG": str(directory / "admin.kubeconfig"), "HOME": str(home)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert config in printed
    assert " Ready " in nodes
    again = finished(home, "up")
    assert "a cluster is up already" in again
    assert config in again

    assert "ended the cluster" in finished(home, "down")

    assert traces.left_of(directory, namespaces) == []
    assert traces.differences(before, traces.machine_state()) == []
    assert "ended the cluster" not in finished(home, "down")


def test_down_finds_the_node_of_an_up_that_was_killed(home: Path) -> None:
    running = command(home, "up")
    directory, namespaces = namespaces_when_it_runs(home)
    running.kill()
    running.communicate(timeout=30)
    # It is meant to outlive its maker: the reason why it must be found.
    assert traces.processes_in(namespaces)

    assert "ended the cluster" in finished(home, "down")

    assert traces.left_of(directory, namespaces) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_nothing_by_itself(home: Path, number: signal.Signals) -> None:
    running = command(home, "up")
    directory, namespaces = namespaces_when_it_runs(home)
    running.send_signal(number)
    running.communicate(timeout=120)

    assert running.returncode == 128 + number
    assert traces.left_of(directory, namespaces) == []
    assert not (home / "cache" / "cluster-up" / "directory").exists()


def test_down_waits_for_an_up_that_is_on_its_way(home: Path) -> None:
    lock = home / "cache" / "cluster-up" / ".lock"
    lock.parent.mkdir()
    with assets.lock(lock):
        waiting = command(home, "down")
        assert waiting.stdout is not None
        assert "another run holds" in waiting.stdout.readline()
        assert waiting.poll() is None
    assert waiting.wait(60) == 0
    waiting.stdout.close()
