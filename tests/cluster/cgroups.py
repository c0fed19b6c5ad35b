"""A node's own control groups: made before the kubelet starts, removed after the node has ended."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cluster.process import wait_until

ROOT = Path("/sys/fs/cgroup")
PREFIX = "job-reaper-node-"


def hierarchies() -> list[Path]:
    """Where groups must be made: the one tree of version 2, or each controller's of version 1."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    version_1 = sorted({Path(fields[1]) for fields in mounts if fields[2] == "cgroup"})
    if version_1:
        return version_1
    return [Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"][:1]


def create(name: str) -> None:
    """Make the node's top group in each hierarchy; kubelet refuses a root group that does not exist."""
    for tree in hierarchies():
        (tree / name).mkdir(exist_ok=True)


def remove(name: str) -> None:
    """Remove the group and all below it, once the kernel has let go of the last process in it."""
    wait_until(lambda: _try_remove(name), timeout=30, what=f"control group {name} to be empty", interval=0.1)


def present() -> set[str]:
    """Names of all groups that a cluster of ours made and nobody removed yet."""
    return {path.name for tree in hierarchies() for path in tree.glob(f"{PREFIX}*")}


def _try_remove(name: str) -> bool:
    for tree in hierarchies():
        top = tree / name
        if not top.is_dir():
            continue
        for directory, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                continue
            except OSError:
                return False
    return True
