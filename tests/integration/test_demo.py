"""The demonstration is a claim about the product, so it is tested like one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest

from reconciler.demo.check import check
from reconciler.demo.scenario import FAST, NORMAL, Fate, Task, tasks
from reconciler.demo.stage import SCHEMA, furnish
from tests.postgres import Connection, wait_until

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "reconciler", "demo", "--fast"]


@contextmanager
def a_demo(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A running `job-reaper demo`; killed at the end should it still run."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs us in the background ignores SIGINT for all its children: here it must be heard.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait()


def the_descendants(pid: int) -> dict[int, str]:
    """Every process below this one, with its command line."""
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except FileNotFoundError:
            continue
        for child in map(int, children):
            waiting.append(child)
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except FileNotFoundError:
                continue
    return found


def state_of(pid: int) -> str:
    """The kernel's letter: R, S, T for stopped, Z for a zombie, X when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if match := re.search(pattern, line):
            return match
    pytest.fail(f"the demo never said {pattern!r}: {''.join(said)}")


# ── the whole play ──────────────────────────────────────────────────────────────────────────────────


def test_the_demo_recovers_every_job_and_leaves_nothing_behind() -> None:
    with a_demo("--seed", "1") as demo:
        before = wait_until(lambda: the_descendants(demo.pid))
        out, err = demo.communicate(timeout=90)
    assert demo.returncode == 0, out + err
    assert "All 12 jobs accounted for" in out
    assert "11 done, each exactly once" in out
    assert "1 failed for good after 3 attempts" in out
    for what in ("killed (SIGKILL)", "hangs (SIGSTOP)", "was fenced", "requeued", "failed jobs/"):
        assert what in out, f"{what!r} was not shown:\n{out}"
    assert "\x1b" not in out, "escape codes in a file"
    assert all(state_of(pid) == "X" for pid in before)


def test_a_configured_database_is_never_used_by_accident(dsn: str, conn: Connection) -> None:
    with a_demo(DATABASE_URL=dsn, REAPER_CONFIG="/nonexistent.yaml", CLIP_SLA_FACTOR="banana") as demo:
        out, err = demo.communicate(timeout=90)
    assert demo.returncode == 0, out + err
    assert conn.execute("select count(*) from jobs").fetchone() == (0,)
    assert conn.execute("select count(*) from job_events").fetchone() == (0,)


def test_a_named_database_gets_a_schema_that_is_removed_again(dsn: str, conn: Connection) -> None:
    with a_demo("--dsn", dsn) as demo:
        out, err = demo.communicate(timeout=90)
    assert demo.returncode == 0, out + err
    assert conn.execute("select count(*) from jobs").fetchone() == (0,)
    assert conn.execute("select to_regnamespace(%s)", (SCHEMA,)).fetchone() == (None,)


def test_a_schema_that_is_already_there_is_not_touched(dsn: str, conn: Connection) -> None:
    conn.execute(f"create schema {SCHEMA} create table precious (id int)".encode())
    with a_demo("--dsn", dsn) as demo:
        _, err = demo.communicate(timeout=30)
    assert demo.returncode == 2
    assert "already has a schema" in err
    assert conn.execute(f"select count(*) from {SCHEMA}.precious".encode()).fetchone() == (0,)


def test_a_database_that_cannot_be_reached_is_said_in_one_line() -> None:
    with a_demo("--dsn", "postgresql://nobody@127.0.0.1:1/none") as demo:
        _, err = demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert "--dsn" in err
    assert "Traceback" not in err


def test_a_lost_job_makes_the_demo_fail(dsn: str, conn: Connection) -> None:
    with a_demo("--dsn", dsn, "--seed", "1") as demo:
        read_until(demo, "finished")
        gone = conn.execute(f"delete from {SCHEMA}.asr_jobs where id = 5".encode())
        assert gone.rowcount == 1
        out, err = demo.communicate(timeout=90)
    assert demo.returncode == 1, out + err
    assert "asr_jobs/5: lost, the row is gone" in out


def test_keep_leaves_a_database_that_can_be_read_and_removed() -> None:
    with a_demo("--keep") as demo:
        out, err = demo.communicate(timeout=90)
    assert demo.returncode == 0, out + err
    dsn = re.search(r"psql '([^']+)'", out)
    remove = re.search(r"to remove it: (kill -INT (\d+) && rm -rf (\S+))", out)
    assert dsn is not None
    assert remove is not None
    try:
        with psycopg.connect(dsn[1]) as connection:
            assert connection.execute("select count(*) from jobs where status = 'done'").fetchone() == (6,)
    finally:
        subprocess.run(remove[1], shell=True, check=True)
    wait_until(lambda: state_of(int(remove[2])) in "XZ", "the kept server did not stop")
    assert not Path(remove[3]).exists()


def test_a_reader_that_leaves_ends_the_demo_without_a_traceback() -> None:
    with a_demo() as demo:
        read_until(demo, "crashed|killed|hangs")
        family = the_descendants(demo.pid)
        assert demo.stdout is not None
        demo.stdout.close()
        assert demo.stderr is not None
        err = demo.stderr.read()
        assert demo.wait(30) == 1, err
    assert "Traceback" not in err
    assert all(state_of(pid) == "X" for pid in family)


def test_a_terminal_without_unicode_sees_the_play_too() -> None:
    with a_demo(PYTHONIOENCODING="ascii") as demo:
        out, err = demo.communicate(timeout=90)
    assert demo.returncode == 0, out + err
    assert "All 12 jobs accounted for" in out


# ── interrupted ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_demo_takes_its_workers_and_its_database_along(how: signal.Signals) -> None:
    """Also the worker that is stopped at that moment, and also when there was no chance to clean up."""
    with a_demo() as demo:
        read_until(demo, r"hangs \(SIGSTOP\)")
        family = the_descendants(demo.pid)
        assert any("postgres" in command for command in family.values())
        wait_until(
            lambda: [pid for pid in family if "worker_process" in family[pid] and state_of(pid) == "T"],
            lambda: f"no worker is stopped: {family}",
            timeout_sec=2,
        )
        demo.send_signal(how)
        _, err = demo.communicate(timeout=30)
        wait_until(
            lambda: all(state_of(pid) in "XZ" for pid in family),
            lambda: f"left behind: {[(pid, state_of(pid), family[pid]) for pid in family]}",
        )
    assert demo.returncode == (-how if how is signal.SIGKILL else 130), err
    assert "Traceback" not in err


def test_a_killed_demo_leaves_no_worker_in_a_named_database(dsn: str) -> None:
    """There no server goes down with it: the workers must notice by themselves."""
    with a_demo("--dsn", dsn) as demo:
        read_until(demo, "crashed|killed|hangs")
        family = the_descendants(demo.pid)
        demo.kill()
        wait_until(
            lambda: all(state_of(pid) in "XZ" for pid in family),
            lambda: f"left behind: {[(pid, state_of(pid), family[pid]) for pid in family]}",
        )


# ── the check can fail ──────────────────────────────────────────────────────────────────────────────


def a_perfect_ending(conn: Connection, play: list[Task]) -> None:
    """The database as a flawless play leaves it: poison failed, one job requeued, all others done."""
    for task in play:
        name = {"table": task.table, "id": task.id}
        if task.fate is Fate.POISON:
            ending = (
                "status = 'failed', attempt_count = 3, fail_code = 'timeout', fail_reason = 'lease_expired'"
            )
            events = ["reaper:requeued", "reaper:requeued", "reaper:failed(timeout)"]
        elif task.fate is Fate.HUNG:
            ending, events = "status = 'done', attempt_count = 2", ["reaper:requeued"]
        else:
            ending, events = "status = 'done', attempt_count = 1", []
        conn.execute(f"update {task.table} set {ending} where id = %(id)s".encode(), name)
        for event in events:
            conn.execute(
                "insert into job_events (job_id, data) values (%(id)s::text, jsonb_build_object("
                "'type', %(type)s::text, 'table', %(table)s::text, 'at', now(),"
                "'details', jsonb_build_object('lease_expires_at', now())))",
                name | {"type": event},
            )
    for table in ("jobs", "asr_jobs"):
        done = f"select '{table}', id, attempt_count, 'w' from {table} where status = 'done'"
        conn.execute(f"insert into demo_output {done}".encode())


@pytest.fixture
def play(empty_dsn: str) -> Iterator[tuple[Connection, list[Task]]]:
    made = tasks(1, FAST)
    furnish(empty_dsn, made)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        a_perfect_ending(connection, made)
        yield connection, made


def test_a_perfect_ending_passes_the_check(play: tuple[Connection, list[Task]]) -> None:
    account = check(*play)
    assert account.faults == ()
    assert (account.done, account.failed, account.requeues) == (11, 1, 3)


SABOTAGE: list[tuple[LiteralString, str]] = [
    ("delete from asr_jobs where id = 5", "lost"),
    (
        "insert into asr_jobs (id, title, work_sec, fate, status) values (99, 'x', 1, 'calm', 'done')",
        "nobody asked",
    ),
    ("update jobs set status = 'queued' where fate = 'calm'", "is queued, not done"),
    ("update jobs set status = 'processing' where fate = 'calm'", "is processing, not done"),
    ("update jobs set status = 'failed' where fate = 'calm'", "is failed, not done"),
    ("update jobs set status = 'done' where fate = 'poison'", "is done, not failed"),
    ("update jobs set locked_by = 'w' where fate = 'calm'", "still locked"),
    ("update jobs set lease_expires_at = now() where fate = 'calm'", "still locked"),
    ("insert into demo_output select * from demo_output", "was produced by attempts"),
    ("delete from demo_output", "was produced by attempts"),
    ("update demo_output set attempt = attempt + 1", "was produced by attempts"),
    ("delete from job_events", "but has 0 requeues"),
    ("insert into job_events (job_id, data) select job_id, data from job_events", "but has"),
    ('update job_events set data = data || \'{"type": "other"}\'', "unexpected events"),
    ("update jobs set fail_code = 'worker_lost' where fate = 'poison'", "another reason"),
    ("update jobs set attempt_count = 2 where fate = 'poison'", "after 2 of 3 attempts"),
    (
        "insert into demo_output select 'jobs', id, 3, 'w' from jobs where fate = 'poison'",
        "failed, but was produced",
    ),
]


@pytest.mark.parametrize(
    ("statement", "fault"), SABOTAGE, ids=[f"{n}-{fault}" for n, (_, fault) in enumerate(SABOTAGE)]
)
def test_each_broken_promise_is_found(
    play: tuple[Connection, list[Task]], statement: LiteralString, fault: str
) -> None:
    conn, made = play
    conn.execute(statement)
    assert any(fault in found for found in check(conn, made).faults), check(conn, made).faults


# ── the scenario ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(20))
def test_every_seed_has_the_same_cast(seed: int) -> None:
    for pace in (NORMAL, FAST):
        made = tasks(seed, pace)
        fates = [task.fate for task in made]
        assert len({task.name for task in made}) == 12
        assert (fates.count(Fate.POISON), fates.count(Fate.HUNG), fates.count(Fate.KILLED)) == (1, 1, 3)
        assert made == tasks(seed, pace)
