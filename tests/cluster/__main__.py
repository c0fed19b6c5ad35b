"""python -m tests.cluster prepare|up|down: the cluster as a command, behind the make targets.

prepare [api|node]: get the programs, system packages and images, so that tests start in seconds.
up: start a node that stays, print what kubectl and helm need. down: end it, and sweep what killed runs left.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tests.cluster import assets, images, preflight, system_packages
from tests.cluster.assets import cache_root, lock, say
from tests.cluster.node_tier import NodeTier
from tests.cluster.process import ClusterError
from tests.cluster.sandbox import STATE_FILE, SandboxState, sweep

# In the node's directory when everything is there; without it `up` was killed half-way.
READY = "up-and-ready"
USAGE = "usage: python -m tests.cluster prepare [api|node] | up | down"


def prepare(tier: str) -> None:
    """Everything that takes minutes, with its time; a second run takes seconds."""
    began = time.monotonic()
    if tier == "node":
        if os.geteuid() == 0:
            system_packages.ensure()
        reasons = preflight.node_tier_lacks()
        if reasons:
            raise ClusterError("the node tier cannot run here: " + "; ".join(reasons))
    assets.locate(assets.ALL_PROGRAMS if tier == "node" else assets.API_PROGRAMS)
    say(f"programs ready after {time.monotonic() - began:.1f} s")
    if tier == "node":
        images.pause_image()
        images.product_image()
        say(f"images ready after {time.monotonic() - began:.1f} s")


def up() -> None:
    """Start a node that outlives this command; once up, a second `up` only prints the exports again."""
    with lock(_home() / ".lock"):
        directory = _remembered()
        if directory is not None and (directory / READY).exists():
            say("a cluster is up already")
        else:
            if directory is not None:
                say(f"an earlier `up` was killed half-way: removing {directory}")
                _end(directory)
            directory = _start()
    programs = assets.locate(assets.ALL_PROGRAMS)["kubectl"].parent
    print("# for kubectl and helm; `make cluster-down` ends it")
    print(f"export KUBECONFIG={directory / 'admin.kubeconfig'}")
    print(f'export PATH="{programs}:$PATH"')
    print(f"# the project's image is on the node as {images.PRODUCT_IMAGE} (imagePullPolicy: Never)")


def down() -> None:
    """End the cluster of `up`, and remove what runs that were killed have left."""
    with lock(_home() / ".lock"):
        directory = _remembered()
        if directory is not None:
            _end(directory)
            say(f"ended the cluster in {directory}")
        for left in sweep():
            say(f"removed {left}, left by a run that was killed")
    print("unset KUBECONFIG")


def _start() -> Path:
    """Start the node; whatever stops us on the way stops the node too, and what is killed is remembered."""
    prepare("node")
    tier = NodeTier(assets.locate(assets.ALL_PROGRAMS), images.pause_image(), outlive_parent=True)
    _memory().write_text(str(tier.directory))
    try:
        tier.start()
        tier.product_image()
        tier.api.close()
        (tier.directory / READY).touch()
    except BaseException:
        tier.stop()
        _memory().unlink()
        raise
    return tier.directory


def _end(directory: Path) -> None:
    SandboxState.load(directory).destroy()
    _memory().unlink()


def _home() -> Path:
    """Of the lock and the memory of the one cluster that stays."""
    directory = cache_root() / "cluster-up"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _memory() -> Path:
    return _home() / "directory"


def _remembered() -> Path | None:
    """The directory of the cluster that `up` started, or began to start; None when its node has ended."""
    if not _memory().exists():
        return None
    directory = Path(_memory().read_text())
    # After a reboot there are only leftovers, which `sweep` takes.
    if (directory / STATE_FILE).exists() and not SandboxState.load(directory).abandoned:
        return directory
    _memory().unlink()
    return None


def _asked_to_end(*_: object) -> None:
    # As an exception, so that what we have started is ended too; the default would just drop us.
    raise SystemExit(128 + signal.SIGTERM)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, _asked_to_end)
    try:
        match arguments:
            case ["prepare"]:
                prepare("node")
            case ["prepare", ("api" | "node") as tier]:
                prepare(tier)
            case ["up"]:
                up()
            case ["down"]:
                down()
            case _:
                print(USAGE, file=sys.stderr)
                return 2
    except ClusterError as error:
        print(f"[cluster] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[cluster] interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
