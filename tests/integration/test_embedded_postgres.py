"""The private Postgres: starts anywhere, keeps what was committed, and never outlives its owner."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from reconciler.demo import installations
from reconciler.demo.postgres import EmbeddedPostgres, Installation, find_installations, newest_of_each_major
from reconciler.errors import DatabaseError, UsageError
from tests.nobody import a_python_for_everybody
from tests.postgres import wait_until

ROOT = Path(__file__).parents[2]
by_major = pytest.mark.parametrize(
    "installation", newest_of_each_major(), ids=lambda installation: f"pg{installation.major}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as running:
        yield running


def ask(dsn: str, question: str) -> Any:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(question.encode())
        row = cursor.fetchone() if cursor.description else None
    return row[0] if row else None


def is_running(pid: int) -> bool:
    """Whether a process lives; a zombie waits for its parent only."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ── finding ─────────────────────────────────────────────────────────────────────────────────────────


def test_both_majors_of_the_wheel_are_found() -> None:
    assert {found.major for found in find_installations() if found.source == "embedded"} == {16, 18}


def test_a_client_without_a_server_is_no_installation(tmp_path: Path) -> None:
    (tmp_path / "initdb").touch(mode=0o755)
    assert installations._major_of(tmp_path) is None


def test_the_machines_own_postgres_comes_before_the_wheels() -> None:
    sources = [found.source for found in find_installations()]
    assert sources == sorted(sources, key=["system", "embedded"].index)


def test_a_machine_without_postgres_gets_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installations, "_found", lambda: ())
    with pytest.raises(UsageError, match=r"pip install 'job-reaper\[demo\]' or apt-get install postgresql"):
        EmbeddedPostgres()


# ── running ─────────────────────────────────────────────────────────────────────────────────────────


@by_major
def test_each_major_found_starts_and_leaves_nothing_behind(installation: Installation) -> None:
    with EmbeddedPostgres(installation) as running:
        assert ask(running.dsn, "show server_version_num")[:2] == str(installation.major)
        base, pid = running.base, running.pid
    assert not base.exists()
    assert not is_running(pid)


def test_the_socket_lies_where_only_its_owner_can_open_it(server: EmbeddedPostgres) -> None:
    assert server.base.stat().st_mode & 0o777 == 0o700


def test_settings_reach_the_server() -> None:
    with EmbeddedPostgres(settings={"max_connections": "17"}) as running:
        assert ask(running.dsn, "show max_connections") == "17"


@pytest.mark.parametrize(("durable", "fsync"), [(True, "on"), (False, "off")])
def test_only_a_durable_server_flushes_to_disk(durable: bool, fsync: str) -> None:
    with EmbeddedPostgres(durable=durable) as running:
        assert ask(running.dsn, "show fsync") == fsync


def test_a_tcp_listener_asks_for_the_password() -> None:
    with EmbeddedPostgres(listen=["127.0.0.1"]) as running:
        assert ask(running.url_for("127.0.0.1"), "select 7") == 7
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(running.url_for("127.0.0.1").replace(running.password, "wrong"))


def test_without_listeners_no_tcp_port_is_open(server: EmbeddedPostgres) -> None:
    assert ask(server.dsn, "show listen_addresses") == ""


def test_our_own_libpq_variables_do_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGDATA", "/nonexistent")
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("LC_ALL", "xx_XX")
    with EmbeddedPostgres() as running:
        assert ask(running.dsn, "select 1") == 1


def test_a_setting_that_postgres_refuses_shows_the_servers_own_words() -> None:
    with (
        pytest.raises(DatabaseError, match="no_such_setting"),
        EmbeddedPostgres(settings={"no_such_setting": "1"}),
    ):
        pass


def test_a_given_data_directory_is_kept() -> None:
    with EmbeddedPostgres() as scratch:
        data_dir = scratch.base.parent / f"{scratch.base.name}-kept"
    try:
        with EmbeddedPostgres(data_dir=data_dir) as running:
            ask(running.dsn, "create table kept as select 1 as one")
        with EmbeddedPostgres(data_dir=data_dir) as running:
            assert ask(running.dsn, "select one from kept") == 1
    finally:
        subprocess.run(["rm", "-rf", str(data_dir)], check=True)


# ── dying ───────────────────────────────────────────────────────────────────────────────────────────


@by_major
def test_what_was_committed_survives_kill_and_restart(installation: Installation) -> None:
    with EmbeddedPostgres(installation) as running:
        witness = psycopg.connect(running.dsn, autocommit=True)
        witness.execute("create table t as select 1 as one")
        first = running.pid
        running.kill()
        with pytest.raises(psycopg.OperationalError):
            witness.execute("select 1")
        witness.close()
        running.start()
        assert running.pid != first
        assert ask(running.dsn, "select one from t") == 1
        running.restart()
        assert ask(running.dsn, "select one from t") == 1


def test_stopping_twice_is_harmless() -> None:
    running = EmbeddedPostgres()
    running.start()
    running.stop()
    running.stop()
    with pytest.raises(DatabaseError, match="not running"):
        assert running.pid
    running.close()
    running.close()


def owner(body: str, *, user: str | None = None, python: str = sys.executable) -> subprocess.Popen[str]:
    """Another Python that starts a server, reports `pid base children`, and then does what `body` says."""
    prologue = """
        import sys
        sys.path.insert(0, {root!r})
        import os, psycopg, signal
        from reconciler.demo.postgres import EmbeddedPostgres
        server = EmbeddedPostgres()
        server.start()
        with psycopg.connect(server.dsn) as connection:
            children = [str(pid) for (pid,) in connection.execute("select pid from pg_stat_activity")]
        print(server.pid, server.base, server.dsn, *children, flush=True)
    """
    script = textwrap.dedent(prologue).format(root=str(ROOT)) + textwrap.dedent(body)
    arguments: dict[str, Any] = {}
    if user is not None:
        entry = pwd.getpwnam(user)
        arguments = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": [], "cwd": "/"}
        arguments["env"] = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    return subprocess.Popen(
        [python, "-B", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **arguments
    )


def report_of(process: subprocess.Popen[str]) -> tuple[int, Path, str, list[int]]:
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words, f"the owner did not start a server: exit {process.wait(10)}"
    return int(words[0]), Path(words[1]), words[2], [int(word) for word in words[3:]]


@pytest.mark.parametrize("last_words", ["sys.stdin.read()", "os.fork() or signal.pause(); sys.stdin.read()"])
def test_the_server_and_its_children_end_when_their_owner_is_sigkilled(last_words: str) -> None:
    """Also with a forked sibling of the owner still holding the pipe."""
    process = owner(last_words)
    pid, base, _, children = report_of(process)
    assert is_running(pid)
    sibling = [
        int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    process.kill()
    process.wait()
    try:
        # Soon, because Postgres by itself also ends within a minute, once its lock file is gone.
        wait_until(lambda: not is_running(pid), f"postgres {pid} outlived its owner", timeout_sec=7)
        wait_until(lambda: not any(map(is_running, children)), f"a child of postgres outlived it: {children}")
        wait_until(lambda: not base.exists(), f"{base} was left behind")
    finally:
        for child in sibling:
            if is_running(child):
                os.kill(child, signal.SIGKILL)
        process.communicate()


def test_a_detached_server_outlives_its_owner() -> None:
    process = owner("server.detach()")
    pid, base, dsn, _ = report_of(process)
    try:
        process.communicate(timeout=20)
        assert process.returncode == 0
        assert ask(dsn, "select 1") == 1
    finally:
        os.kill(pid, signal.SIGINT)
        wait_until(lambda: not is_running(pid))
        subprocess.run(["rm", "-rf", str(base)], check=True)


# ── who we are ──────────────────────────────────────────────────────────────────────────────────────

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")


@as_root
def test_root_runs_the_server_as_nobody(server: EmbeddedPostgres) -> None:
    assert Path(f"/proc/{server.pid}").stat().st_uid == pwd.getpwnam("nobody").pw_uid


@as_root
def test_a_user_without_rights_can_run_it_too() -> None:
    process = owner("server.close()", user="nobody", python=a_python_for_everybody())
    _, base, _, _ = report_of(process)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not base.exists()


@as_root
def test_binaries_in_a_closed_home_are_copied_out(tmp_path: Path) -> None:
    embedded = next(found for found in find_installations() if found.source == "embedded")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    package = embedded.bin_dir.parents[1]
    for part in (package.name, f"{package.name}.libs"):
        subprocess.run(["cp", "-rl", str(package.parent / part), str(closed / part)], check=True)
    moved = Installation(
        closed / package.name / embedded.bin_dir.parent.name / "bin", embedded.major, "embedded"
    )
    with EmbeddedPostgres(moved) as running:
        assert ask(running.dsn, "select 1") == 1
        assert Path(f"/proc/{running.pid}/exe").readlink().is_relative_to(running.base)


@as_root
def test_a_temporary_directory_nobody_can_enter_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(closed))
    with EmbeddedPostgres() as running:
        assert not running.base.is_relative_to(closed)
