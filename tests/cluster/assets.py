"""Where the programs of the cluster come from: given, cached, downloaded, or built; in that order.

Whatever is cached is checksummed: the sum is written last, by an atomic rename, so that a program whose
download or build was cut off has no sum and is made again. Two runs at once share one lock; the second
finds what the first has made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.cluster.process import ClusterError

KUBERNETES_VERSION = "v1.34.4"
API_PROGRAMS = ("etcd", "kube-apiserver", "kubectl")
NODE_PROGRAMS = ("kubelet", "kube-controller-manager", "kube-scheduler", "kube-proxy")
ALL_PROGRAMS = API_PROGRAMS + NODE_PROGRAMS
GIVEN_VARIABLE = "KUBEBUILDER_ASSETS"
REPOSITORY = Path(__file__).parents[2]
GO_MODULE = Path(__file__).parent / "go"

Progress = Callable[[str], None]
# A source makes the named program in the given file, or raises SourceUnavailableError to let the next one
# try.
Source = Callable[[str, Path, Progress], None]


class SourceUnavailableError(ClusterError):
    """This source cannot give the program here; the next one is asked. The message says why."""


def machine() -> str:
    """The Go name of this processor, as upstream uses it in file names."""
    names = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
    try:
        return names[platform.machine().lower()]
    except KeyError:
        raise ClusterError(f"no Kubernetes programs are known for processor {platform.machine()}") from None


def cache_root() -> Path:
    """The project's cache directory: JOB_REAPER_CACHE, else below XDG_CACHE_HOME, else below ~/.cache."""
    given = os.environ.get("JOB_REAPER_CACHE")
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base).absolute() / "job-reaper"


def say(message: str) -> None:
    """Progress goes to stderr at once: a build of ten minutes must not look like a hang."""
    print(f"[cluster] {message}", file=sys.stderr, flush=True)


def locate(
    programs: Sequence[str],
    *,
    given: Path | None = None,
    cache: Path | None = None,
    sources: Sequence[Source] | None = None,
    progress: Progress = say,
) -> Mapping[str, Path]:
    """Return a path for each program, making what is missing.

    A given directory (argument or KUBEBUILDER_ASSETS) is taken as it is for the programs it holds; the rest
    comes from the cache, and what the cache lacks from the sources in order.
    """
    from_environment = os.environ.get(GIVEN_VARIABLE)
    given = given or (Path(from_environment) if from_environment else None)
    found: dict[str, Path] = {}
    if given is not None:
        if not given.is_dir():
            raise ClusterError(f"{given} (from {GIVEN_VARIABLE} or the option) is not a directory")
        found = {name: given / name for name in programs if os.access(given / name, os.X_OK)}
    missing = [name for name in programs if name not in found]
    if missing:
        directory = (cache or cache_root()) / f"kubernetes-{KUBERNETES_VERSION}-{machine()}-{_pins()}"
        found.update(
            _from_cache(missing, directory, default_sources() if sources is None else sources, progress)
        )
    return found


def default_sources() -> Sequence[Source]:
    """Upstream's own files first (a minute), our own build last (ten)."""
    from tests.cluster import gobuild, upstream

    return (upstream.from_envtest, upstream.from_release, gobuild.build)


def _pins() -> str:
    """Changes whenever the pinned module versions do, so that an old cache is never taken for a new pin."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        digest.update((GO_MODULE / name).read_bytes())
    return digest.hexdigest()[:10]


def _from_cache(
    programs: Sequence[str], directory: Path, sources: Sequence[Source], progress: Progress
) -> dict[str, Path]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(f"cannot make the cache {directory} ({error}); set JOB_REAPER_CACHE") from error
    if not os.access(directory, os.W_OK):
        # A cache that somebody else filled (an image, another user) serves as long as nothing is missing.
        broken = [name for name in programs if not intact(directory / name)]
        if broken:
            raise ClusterError(
                f"{directory} lacks {', '.join(broken)} and is not writable; set JOB_REAPER_CACHE"
            )
        return {name: directory / name for name in programs}
    with lock(directory / ".lock", progress):
        for name in programs:
            if not intact(directory / name):
                _make(name, directory, sources, progress)
    return {name: directory / name for name in programs}


def _make(name: str, directory: Path, sources: Sequence[Source], progress: Progress) -> None:
    began = time.monotonic()
    reasons = []
    for source in sources:
        # A fresh directory per try: what an earlier, killed run left is never picked up.
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory) as partial:
            target = Path(partial) / name
            try:
                source(name, target, progress)
            except SourceUnavailableError as reason:
                reasons.append(str(reason))
                continue
            target.chmod(0o755)
            keep(target, directory / name)
            progress(f"{name} ready after {time.monotonic() - began:.0f} s")
            return
    raise ClusterError(f"cannot get {name}: " + "; ".join(reasons))


def keep(made: Path, final: Path) -> None:
    """Move a finished file into the cache: the file first, its checksum last, both by rename."""
    sums = _sum_file(final)
    sums.unlink(missing_ok=True)
    digest = sha256(made)
    os.replace(made, final)
    written = sums.with_suffix(".part")
    written.write_text(f"{digest}  {final.name}\n")
    os.replace(written, sums)


def discard(path: Path) -> None:
    """Remove a file from the cache: its checksum first, so that half a removal leaves no asset."""
    _sum_file(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def intact(path: Path) -> bool:
    """Is this the file whose checksum was recorded when it was finished?"""
    sums = _sum_file(path)
    return path.is_file() and sums.is_file() and sums.read_text().split()[:1] == [sha256(path)]


def recorded_sum(path: Path) -> str:
    """The checksum of a file that is intact, without reading all of it again."""
    return _sum_file(path).read_text().split()[0]


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: Path, progress: Progress = say) -> Iterator[None]:
    """Hold a lock file; the kernel lets go of it when the holder dies, however it dies."""
    with path.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another run holds {path}; waiting for what it makes")
            fcntl.flock(held, fcntl.LOCK_EX)
        for left in path.parent.glob(".partial-*"):
            # We hold the lock, so whoever made this is gone.
            shutil.rmtree(left, ignore_errors=True)
        yield


def _sum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
