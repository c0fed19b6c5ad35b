"""A node's own control groups: made before the kubelet starts, removed after the node has ended."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cluster.process import wait_until

ROOT = Path("/sys/fs/cgroup")
PREFIX = "job-reaper-node-"


def hierarchies() -> list[Path]:
    """Every tree of groups: the one of version 2, each controller's of version 1, and on hybrids both.

    On a hybrid runc makes its groups in version 2's tree as well, where nobody asked for them.
    """
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted({Path(fields[1]) for fields in mounts if fields[2] in ("cgroup", "cgroup2")})


def create(name: str) -> None:
    """Make the node's top group in each hierarchy; kubelet refuses a root group that does not exist."""
    for tree in hierarchies():
        (tree / name).mkdir(exist_ok=True)


def remove(name: str) -> None:
    """Remove the group and all below it, once the kernel has let go of the last process in it."""
    wait_until(lambda: _try_remove(name), timeout=30, what=f"control group {name} to be empty", interval=0.1)


def present() -> set[str]:
    """Names of all groups that a cluster of ours made and nobody removed yet.

    Looks at directories and not at hierarchies(): a check must not share the blind spot of what it checks.
    """
    return {path.name for pattern in (f"{PREFIX}*", f"*/{PREFIX}*") for path in ROOT.glob(pattern)}


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
