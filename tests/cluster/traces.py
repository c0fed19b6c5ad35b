"""What a node could leave behind, so that a test can show that it left nothing.

Two questions: is the machine as it was (mounts, links, routes, firewall tables, kernel settings), and does
anything of the node live on (processes in its namespaces, its control group, its directory)?
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.cluster import cgroups
from tests.cluster.supervisor import KERNEL_SETTINGS

KINDS = ("pid", "net", "mnt")


def namespaces_of(pid: int) -> frozenset[str]:
    """The namespaces of a process that are not ours, as the kernel names them."""
    theirs = {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS}
    ours = {os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS}
    return frozenset(theirs - ours)


def processes_in(namespaces: frozenset[str]) -> list[int]:
    """Every process of the machine that lives in one of these namespaces."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            for kind in KINDS:
                # Processes end while we look.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    if os.readlink(entry / "ns" / kind) in namespaces:
                        found.append(int(entry.name))
                        break
    return found


def machine_state() -> Mapping[str, frozenset[str]]:
    """What a badly behaved node would change on the machine itself."""
    settings = {name: Path("/proc/sys") / name for name in KERNEL_SETTINGS}
    return {
        "mounts": _lines(Path("/proc/self/mounts").read_text()),
        "links": frozenset(os.listdir("/sys/class/net")),
        "routes": _lines(_output("ip", "route", "show", "table", "all")),
        "named network namespaces": _lines(_output("ip", "netns", "list")),
        "firewall tables": _lines(_output("nft", "list", "tables")),
        "hosts file": _lines(Path("/etc/hosts").read_text()),
        "kernel settings": frozenset(
            f"{name}={path.read_text().strip()}" for name, path in settings.items() if path.exists()
        ),
    }


def differences(before: Mapping[str, frozenset[str]], after: Mapping[str, frozenset[str]]) -> list[str]:
    """One line for each thing that appeared or vanished; empty means the machine is as it was."""
    return [
        f"{kind}: {word} {item}"
        for kind in before
        for word, items in (("new", after[kind] - before[kind]), ("gone", before[kind] - after[kind]))
        for item in sorted(items)
    ]


def left_of(directory: Path, namespaces: frozenset[str]) -> list[str]:
    """What lives on of one node that should be gone."""
    left = [f"process {pid}" for pid in processes_in(namespaces)]
    left += [f"control group {name}" for name in cgroups.present() if name == directory.name]
    left += [f"directory {directory}"] if directory.exists() else []
    return left


def _lines(text: str) -> frozenset[str]:
    return frozenset(line.strip() for line in text.splitlines() if line.strip())


def _output(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout
