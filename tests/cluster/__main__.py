"""python -m tests.cluster prepare|up|down: the cluster as a command, behind the make targets.

prepare [api|node]: get the programs, system packages and images, so that tests start in seconds.
up: start a node that stays, print what kubectl and helm need. down: end it, and sweep what killed runs left.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.cluster import assets, images, preflight, system_packages
from tests.cluster.assets import cache_root, say
from tests.cluster.node_tier import NodeTier
from tests.cluster.process import ClusterError
from tests.cluster.sandbox import SandboxState, sweep

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
    running = _remembered()
    if running is None:
        prepare("node")
        tier = NodeTier(assets.locate(assets.ALL_PROGRAMS), images.pause_image(), outlive_parent=True)
        tier.start()
        tier.product_image()
        tier.api.close()
        _memory().write_text(str(tier.directory))
        directory = tier.directory
    else:
        directory = Path(running.directory)
        say("a cluster is up already")
    programs = assets.locate(assets.ALL_PROGRAMS)["kubectl"].parent
    print("# for kubectl and helm; `make cluster-down` ends it")
    print(f"export KUBECONFIG={directory / 'admin.kubeconfig'}")
    print(f'export PATH="{programs}:$PATH"')
    print(f"# the project's image is on the node as {images.PRODUCT_IMAGE} (imagePullPolicy: Never)")


def down() -> None:
    """End the cluster of `up`, and remove what runs that were killed have left."""
    running = _remembered()
    if running is not None:
        running.destroy()
        say(f"ended the cluster in {running.directory}")
    _memory().unlink(missing_ok=True)
    for directory in sweep():
        say(f"removed {directory}, left by a run that was killed")
    print("unset KUBECONFIG")


def _memory() -> Path:
    cache_root().mkdir(parents=True, exist_ok=True)
    return cache_root() / "cluster-up"


def _remembered() -> SandboxState | None:
    """The cluster that `up` started, if it still runs."""
    if not _memory().exists():
        return None
    directory = Path(_memory().read_text())
    if not directory.exists():
        return None
    state = SandboxState.load(directory)
    return None if state.abandoned else state


def main(arguments: list[str]) -> int:
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
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
