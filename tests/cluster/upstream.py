"""Prebuilt programs from upstream, where the internet is reachable; every byte checked before it is kept.

Two places: setup-envtest's index (etcd, kube-apiserver, kubectl in one archive, SHA-512 in the index) and
the Kubernetes release itself (one file per program, SHA-256 beside it). A machine without internet must not
wait for them: one short attempt to connect, and the answer holds for the rest of the run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.assets import KUBERNETES_VERSION, NODE_PROGRAMS, Progress, SourceUnavailableError, machine
from tests.cluster.process import ClusterError

ENVTEST_INDEX = (
    "https://raw.githubusercontent.com/kubernetes-sigs/controller-tools/HEAD/envtest-releases.yaml"
)
RELEASE = "https://dl.k8s.io/release"
# Tests point these at a server of their own; a company points them at its mirror.
INDEX_VARIABLE = "JOB_REAPER_ENVTEST_INDEX"
RELEASE_VARIABLE = "JOB_REAPER_KUBERNETES_RELEASE"
CONNECT_SECONDS = 4.0
# A server that trickles never meets a socket's timeout; a whole archive is some 100 MB.
DOWNLOAD_SECONDS = 600.0
PIECE = 1 << 20


def from_envtest(name: str, target: Path, progress: Progress) -> None:
    """Take a program from the newest envtest archive of our minor version."""
    if name in NODE_PROGRAMS:
        raise SourceUnavailableError(f"envtest archives hold no {name}")
    index = os.environ.get(INDEX_VARIABLE, ENVTEST_INDEX)
    link, digest, version = _envtest_release(index)
    # Kept beside the programs, because three of them come from the one archive.
    archive = target.parent.parent / f"envtest-{version}.tar.gz"
    if not archive.exists() or _digest(archive, "sha512") != digest:
        progress(f"downloading envtest {version}")
        partial = target.with_name(archive.name)
        _download(link, partial)
        if _digest(partial, "sha512") != digest:
            raise ClusterError(f"{link} does not match the SHA-512 in {index}; nothing of it was used")
        os.replace(partial, archive)
    with tarfile.open(archive) as opened:
        for member in opened:
            if member.isfile() and Path(member.name).name == name:
                content = opened.extractfile(member)
                assert content is not None
                with target.open("wb") as out:
                    while piece := content.read(PIECE):
                        out.write(piece)
                return
    raise SourceUnavailableError(f"envtest {version} holds no {name}")


def from_release(name: str, target: Path, progress: Progress) -> None:
    """Take a program from the Kubernetes release we pin."""
    if name == "etcd":
        raise SourceUnavailableError("the Kubernetes release holds no etcd")
    base = os.environ.get(RELEASE_VARIABLE, RELEASE)
    link = f"{base}/{KUBERNETES_VERSION}/bin/linux/{machine()}/{name}"
    expected = _read(f"{link}.sha256").decode().split()[0]
    progress(f"downloading {name} {KUBERNETES_VERSION}")
    _download(link, target)
    if _digest(target, "sha256") != expected:
        raise ClusterError(f"{link} does not match its SHA-256; nothing of it was used")


@functools.cache
def _envtest_release(index: str) -> tuple[str, str, str]:
    releases: dict[str, dict[str, Any]] = yaml.safe_load(_read(index))["releases"]
    minor = KUBERNETES_VERSION.rsplit(".", 1)[0]
    ours = [version for version in releases if version.rsplit(".", 1)[0] == minor]
    if not ours:
        raise SourceUnavailableError(f"{index} lists no {minor}.x")
    version = max(ours, key=lambda text: int(text.rsplit(".", 1)[1]))
    entry = releases[version].get(f"envtest-{version}-linux-{machine()}.tar.gz")
    if entry is None:
        raise SourceUnavailableError(f"envtest {version} has no archive for {machine()}")
    return str(entry["selfLink"]), str(entry["hash"]), version


@functools.cache
def _unreachable(host: str) -> str | None:
    """Why a host cannot be reached, asked once per run: seven programs must not wait seven times."""
    try:
        with urllib.request.urlopen(host, timeout=CONNECT_SECONDS):
            return None
    except urllib.error.HTTPError:
        return None
    except OSError as error:
        return str(getattr(error, "reason", error))


def _read(link: str) -> bytes:
    scheme, _, rest = link.partition("://")
    reason = _unreachable(f"{scheme}://{rest.partition('/')[0]}/")
    if reason is not None:
        raise SourceUnavailableError(f"{link} is out of reach ({reason})")
    try:
        with urllib.request.urlopen(link, timeout=30) as answer:
            return bytes(answer.read())
    except OSError as error:
        raise SourceUnavailableError(f"{link}: {error}") from error


def _download(link: str, target: Path) -> None:
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    try:
        with urllib.request.urlopen(link, timeout=30) as answer, target.open("wb") as out:
            while piece := answer.read1(PIECE):
                out.write(piece)
                if time.monotonic() > deadline:
                    raise SourceUnavailableError(f"{link} took longer than {DOWNLOAD_SECONDS:g} s")
    except OSError as error:
        raise SourceUnavailableError(f"{link}: {error}") from error


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()
