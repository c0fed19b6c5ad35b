"""The tutorial's own blocks, run in order: what a reader types must do what the text says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.factories import the_events, the_job
from tests.postgres import Server

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tutorials_commands_rescue_the_job_whose_worker_was_killed(
    empty_dsn: str, pg_server: Server, tmp_path: Path
) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text())
    (worker,) = [body for language, body in blocks if language == "python"]
    (tmp_path / "worker.py").write_text(worker)
    script = "\n".join(body for language, body in blocks if language == "sh")
    path = [
        str(Path(sys.executable).parent),
        str(pg_server.postgres.installation.bin_dir),
        os.environ["PATH"],
    ]
    done = subprocess.run(
        ["bash", "-c", f"set -eu\n{script}"],
        cwd=tmp_path,
        env={**os.environ, "DATABASE_URL": empty_dsn, "PATH": ":".join(path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "job 1, attempt 1" in done.stdout
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        assert the_job(conn, 1)["status"] == "done"
        rescued = the_job(conn, 2)
        (event,) = the_events(conn)
        due = conn.execute("select next_earliest_run_at - now() > '20 s' from jobs where id = 2").fetchone()
    assert (rescued["status"], rescued["attempt_count"], rescued["locked_by"]) == ("queued", 1, None)
    assert due == (True,)
    assert event["type"] == "reaper:requeued"
    assert event["details"]["reason"] == "lease_expired"
    assert event["details"]["locked_by"].startswith("worker-")


def test_the_tutorial_shows_the_summary_the_demo_prints() -> None:
    from reconciler.demo.check import Account
    from reconciler.demo.run import _summary
    from reconciler.demo.scenario import NORMAL, tasks

    shown = next(
        body
        for language, body in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text())
        if language == "text"
    )
    lines = _summary(Account(11, 1, 6, 0.1, 0.9, ()), tasks(1, NORMAL), [], seed=1)
    printed = ["".join(text for text, _ in line) for line in lines]
    assert shown.splitlines() == printed[1:-1]


@pytest.mark.parametrize("word", ["--keep", "--seed", "--fast", "--dsn"])
def test_every_option_the_tutorial_names_is_one_of_the_demo(word: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "reconciler", "demo", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert word in shown.stdout
