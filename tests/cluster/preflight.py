"""What this machine lacks for the node tier, each with the way to get it: the skip's text, CI's failure."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cluster import cgroups, node_config
from tests.cluster.assets import cache_root
from tests.cluster.process import ClusterError

# Program -> Debian package. What is found on PATH is taken as it is.
PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "iptables": "iptables",
    "ip": "iproute2",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
    "gcc": "gcc",
    "openssl": "openssl",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
}
# The node's own directory, the images' build and storage at their largest.
FREE_GIGABYTES = 6
SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing_packages() -> list[str]:
    """Debian packages that would bring what is not on this machine."""
    lacking = {
        package for program, package in PACKAGES.items() if shutil.which(program, path=SYSTEM_PATH) is None
    }
    try:
        node_config.cni_directory()
    except ClusterError:
        lacking.add("containernetworking-plugins")
    if not _has_static_libc():
        # Debian's gcc only recommends it, and the pause program is static.
        lacking.add("libc6-dev")
    return sorted(lacking)


def _has_static_libc() -> bool:
    """Asked of the compiler, which knows where its libraries lie; without one there is none to link with."""
    if shutil.which("gcc", path=SYSTEM_PATH) is None:
        return False
    answer = subprocess.run(
        ["gcc", "-print-file-name=libc.a"], capture_output=True, text=True, check=False, timeout=30
    )
    # A file that is not found is answered with its bare name.
    return Path(answer.stdout.strip()).is_absolute()


def node_tier_lacks() -> list[str]:
    """Reasons why no node can run here; empty means it can."""
    if platform.system() != "Linux":
        return [f"a node needs Linux, this is {platform.system()}: use a Linux VM or --cluster=kind"]
    if os.geteuid() != 0:
        return [
            f"a kubelet needs root, this is uid {os.geteuid()}: run `sudo make e2e`, "
            "or give a cluster with --kubeconfig"
        ]
    reasons = []
    packages = missing_packages()
    if packages:
        how = "run `make cluster-assets`" if shutil.which("apt-get") else "install them"
        reasons.append(f"missing system packages {' '.join(packages)}: {how}")
    elif not _can_make_namespaces():
        reasons.append(
            "the kernel refuses new namespaces (an unprivileged container?): use a VM or --privileged"
        )
    reasons += [
        f"control groups in {tree} are not writable: run with the host's /sys/fs/cgroup writable"
        for tree in cgroups.hierarchies()
        if not os.access(tree, os.W_OK) or _read_only(tree)
    ]
    if not cgroups.hierarchies():
        reasons.append("no control groups are mounted at /sys/fs/cgroup: mount cgroup2 there")
    if "overlay" not in Path("/proc/filesystems").read_text():
        reasons.append("the kernel has no overlay file system: run `modprobe overlay`")
    return reasons + disk_lacks()


def disk_lacks() -> list[str]:
    """Reasons why the disk is too small; a node on a full disk evicts its pods instead of saying so."""
    return [
        f"{path} has {free / 1e9:.1f} GB free and {FREE_GIGABYTES} GB are needed: "
        f"make room, or set {variable} to a directory on a larger disk"
        for variable, path in (
            ("JOB_REAPER_CACHE", cache_root()),
            ("TMPDIR", Path(tempfile.gettempdir())),
        )
        if (free := shutil.disk_usage(_existing(path)).free) < FREE_GIGABYTES * 10**9
    ]


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


def _can_make_namespaces() -> bool:
    probe = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def _read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
