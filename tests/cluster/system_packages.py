"""Install what the node tier needs with apt-get, and leave the machine's services as they were.

Only ever called by `make` (python -m tests.cluster prepare), never by a test: running tests must not
install software.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.cluster.assets import Progress, say
from tests.cluster.preflight import missing_packages
from tests.cluster.process import ClusterError, run_limited

# What Debian's packages start by themselves; we run a private one.
SERVICES = ("containerd",)
APT_SECONDS = 900.0
# Another apt may hold the lock for a while; a mirror may fail once; neither may hold us for ever.
PATIENCE = (
    "-o=DPkg::Lock::Timeout=120",
    "-o=Acquire::Retries=3",
    "-o=Acquire::http::Timeout=60",
    "-o=Acquire::https::Timeout=60",
)


def ensure(progress: Progress = say) -> None:
    """Install the missing packages; nothing happens when nothing is missing."""
    packages = missing_packages()
    if not packages:
        return
    wanted = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise ClusterError(f"please install (Debian names): {wanted}")
    if os.geteuid() != 0:
        raise ClusterError(f"as root, please run: apt-get install {wanted}")
    began = time.monotonic()
    progress(f"installing {wanted}")
    active_before = {name for name in SERVICES if _active(name)}
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        answer = run_limited(["apt-get", "-qq", *PATIENCE, *command], seconds=APT_SECONDS, env=environment)
        if answer.returncode != 0:
            raise ClusterError(
                f"apt-get {' '.join(command)} failed:\n{answer.stdout[-1500:]}{answer.stderr[-1500:]}"
            )
    for name in SERVICES:
        if name not in active_before and _active(name):
            progress(f"stopping the {name} service that the package has just started")
            subprocess.run(["systemctl", "disable", "--now", name], check=True, capture_output=True)
    still = missing_packages()
    if still:
        raise ClusterError(f"apt-get installed them, and yet these are not found: {' '.join(still)}")
    progress(f"system packages ready after {time.monotonic() - began:.0f} s")


def _active(service: str) -> bool:
    if not Path("/run/systemd/system").exists():
        return False
    return subprocess.run(["systemctl", "is-active", "--quiet", service], check=False).returncode == 0
