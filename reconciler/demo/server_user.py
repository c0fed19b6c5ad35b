"""Whom a private Postgres runs as, and what that user can reach.

Postgres refuses to run as root. Root's servers run as `nobody`, who owns nothing: directories are handed
over to it, and binaries below a closed directory are copied to where it can enter. Permissions of
existing directories are never changed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from reconciler.demo.installations import Installation

LONGEST_BASE = 60  # a socket's whole path must stay under 103 bytes (macOS; Linux allows 107)


def server_identity() -> pwd.struct_passwd | None:
    """Whom the server runs as when it cannot run as us; None when we are not root."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def process_arguments() -> dict[str, Any]:
    """How to start one of the server's programs: its user, its environment, its directory."""
    # Our own PG* variables and locale must not reach the server; its directory must be one it can enter.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PG", "LC_"))}
    arguments: dict[str, Any] = {
        "env": environment | {"LC_ALL": "C", "TZ": "UTC"},
        "cwd": "/",
        "umask": 0o077,
    }
    if (identity := server_identity()) is not None:
        arguments |= {"user": identity.pw_uid, "group": identity.pw_gid, "extra_groups": []}
    return arguments


def hand_over(path: Path) -> None:
    """Make the server's user the owner."""
    if (identity := server_identity()) is not None:
        os.chown(path, identity.pw_uid, identity.pw_gid)


def private_directory() -> Path:
    """A 0700 directory of the server's user, with a path short enough for a socket."""
    parent = tempfile.gettempdir()
    if len(parent) > LONGEST_BASE or not can_reach(Path(parent)):
        parent = "/tmp"  # noqa: S108 - mkdtemp makes an unguessable 0700 directory in it
    base = Path(tempfile.mkdtemp(prefix="job-reaper-", dir=parent))
    hand_over(base)
    return base


def can_reach(path: Path) -> bool:
    """Whether the server's user may read and enter this path. Asked of the kernel: ACLs count as well."""
    if server_identity() is None:
        return os.access(path, os.R_OK | os.X_OK)
    question = ["/bin/sh", "-c", 'test -r "$0" && test -x "$0"', str(path)]
    return subprocess.run(question, check=False, **process_arguments()).returncode == 0  # noqa: S603


def reachable(installation: Installation, base: Path) -> Path:
    """The installation's bin directory, or that of a copy when the server's user cannot enter it."""
    if can_reach(installation.bin_dir / "postgres"):
        return installation.bin_dir
    root = installation.bin_dir.parent
    # The wheel's binaries find their libraries in a sibling of the package: keep that shape.
    copy = base / "copy" / root.parent.name / root.name
    shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns("include"))
    libraries = root.parent.with_name(f"{root.parent.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, base / "copy" / libraries.name)
    for directory, _, names in os.walk(base / "copy"):
        for path in (Path(directory), *(Path(directory, name) for name in names)):
            if not path.is_symlink():
                hand_over(path)
    return copy / installation.bin_dir.name
