"""The user without rights, and what he needs to run a test's program: an interpreter he may start."""

from __future__ import annotations

import pwd
import subprocess
import sys

from tests.ci import cannot_run


def a_python_for_everybody() -> str:
    """An interpreter of our version outside root's home, where `nobody` may start it."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/local/bin/{name}", f"/usr/bin/{name}"):
        question = ["/bin/sh", "-c", '"$0" -c ""', candidate]
        entry = pwd.getpwnam("nobody")
        answer = subprocess.run(
            question,
            check=False,
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
            cwd="/",
            capture_output=True,
        )
        if answer.returncode == 0:
            return candidate
    return cannot_run(f"no {name} that the user nobody may start: apt-get install {name}")
