"""A node leaves nothing behind: not when it is stopped, not when its owner is killed, not after ten times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster import assets, images, traces
from tests.cluster.assets import REPOSITORY
from tests.cluster.node_tier import NodeTier
from tests.cluster.plugin import unavailable
from tests.cluster.preflight import node_tier_lacks
from tests.cluster.process import wait_until
from tests.cluster.sandbox import STATE_FILE, SandboxState, sweep
from tests.e2e.workloads import a_python_pod, python_container, wait_for_phase

pytestmark = pytest.mark.own_cluster
SLEEP = "import time; time.sleep(600)"
# A whole cycle with a pod takes about 30 s; ten of them must not meet the suite's limit for one test.
CYCLE_SECONDS = 300
OWNER = """
import sys
from tests.cluster.sandbox import Sandbox
sandbox = Sandbox()
sandbox.start()
sandbox.start_daemon("sleeper", ["sleep", "600"])
print(sandbox.directory, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _needs_the_node_tier() -> None:
    reasons = node_tier_lacks()
    if reasons:
        unavailable("node tier", "; ".join(reasons))


def one_life(programs: Mapping[str, Path], image: Path) -> tuple[Path, frozenset[str]]:
    """Start a node, run a pod on it that will not end by itself, and stop the node under it."""
    node = NodeTier(programs, images.pause_image())
    node.start()
    try:
        node.load_image(image)
        pod = a_python_pod("sleeper", python_container(node, images.PRODUCT_IMAGE, SLEEP))
        node.api.create("/api/v1/namespaces/default/pods", pod)
        wait_for_phase(node.api, "/api/v1/namespaces/default/pods/sleeper", "Running")
        assert len(traces.processes_in(node.sandbox.namespaces)) > 8
    finally:
        node.stop()
    return node.directory, node.sandbox.namespaces


def test_a_stopped_node_leaves_the_machine_as_it_was() -> None:
    image = images.product_image()
    before = traces.machine_state()

    directory, namespaces = one_life(assets.locate(assets.ALL_PROGRAMS), image)

    assert traces.left_of(directory, namespaces) == []
    assert traces.differences(before, traces.machine_state()) == []


def test_a_killed_owner_takes_the_node_with_it_and_the_next_sweep_the_rest() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner:
        directory = Path(owner.stdout.readline().strip())
        node = SandboxState.load(directory).pids["node"]
        namespaces = traces.namespaces_of(node.number)
        assert len(traces.processes_in(namespaces)) >= 2

        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)

    wait_until(lambda: not traces.processes_in(namespaces), timeout=20, what="the node to end with its owner")
    assert (directory / STATE_FILE).exists()
    assert str(directory) in sweep()
    assert traces.left_of(directory, namespaces) == []


def test_a_sweep_does_not_touch_a_living_node() -> None:
    from tests.cluster.sandbox import Sandbox

    sandbox = Sandbox()
    sandbox.start()
    try:
        assert str(sandbox.directory) not in sweep()
        assert sandbox.daemons() == {}
    finally:
        sandbox.destroy()


def test_a_trace_that_is_left_would_be_seen() -> None:
    """The checks above can fail: a node that runs is found by them."""
    from tests.cluster.sandbox import Sandbox

    sandbox = Sandbox()
    sandbox.start()
    try:
        left = traces.left_of(sandbox.directory, sandbox.namespaces)
        assert {item.split()[0] for item in left} == {"process", "control", "directory"}
    finally:
        sandbox.destroy()


@pytest.mark.long
@pytest.mark.timeout(CYCLE_SECONDS * 10)
def test_ten_lives_in_a_row_leave_nothing() -> None:
    # Made once, so that ten lives run the same image while somebody edits the source.
    programs, image = assets.locate(assets.ALL_PROGRAMS), images.product_image()
    before = traces.machine_state()

    for _ in range(10):
        directory, namespaces = one_life(programs, image)
        assert traces.left_of(directory, namespaces) == []

    assert traces.differences(before, traces.machine_state()) == []
