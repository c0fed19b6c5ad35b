"""The README's own commands and code blocks, run as a reader would type them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg

from tests.factories import a_job, the_events, the_job

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text())
SHELL = [body for language, body in BLOCKS if language == "sh"]
PYTHON = [body for language, body in BLOCKS if language == "python"]


def _run(command: list[str], dsn: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("REAPER_")}
    environment |= {
        "DATABASE_URL": dsn,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_the_first_command_runs_the_demo_and_the_second_the_tests(dsn: str) -> None:
    first, second = (line.split("#")[0].split() for line in SHELL[0].splitlines())
    assert (first, second) == (["make", "demo"], ["make", "test"])
    demo = _run([*first, "DEMO_ARGS=--fast"], dsn)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "jobs accounted for" in demo.stdout
    # This test is part of `make test`: here it is only asked what it would run.
    plan = _run([*second, "--dry-run"], dsn)
    assert plan.returncode == 0, plan.stderr
    assert "scripts/test" in plan.stdout


def test_the_commands_bring_an_empty_database_to_a_first_pass(empty_dsn: str) -> None:
    lines = SHELL[1].splitlines()
    assert lines[0] == "pip install job-reaper", "what the reader installs is this very package"
    assert lines[1].startswith("export DATABASE_URL=")
    done = _run(["bash", "-c", "set -eux\n" + "\n".join(lines[2:])], empty_dsn)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ADD COLUMN" in done.stdout.upper(), "the dry run shows the SQL"
    assert (
        done.stdout.splitlines()[-2:]
        == [
            line
            for line in done.stdout.splitlines()
            if line.startswith(("jobs: 0 requeued", "asr_jobs: 0 requeued"))
        ][-2:]
    )


def test_the_code_blocks_do_what_they_say(dsn: str, conn: psycopg.Connection[tuple[object, ...]]) -> None:
    lost = a_job(conn)
    reaped = _run([sys.executable, "-c", PYTHON[0]], dsn)
    assert reaped.returncode == 0, reaped.stderr
    assert reaped.stdout.startswith("True {'requeued': 1, 'failed': 0")
    assert the_events(conn, lost)[0]["type"] == "reaper:requeued"

    waiting = a_job(
        conn, status="queued", locked_by=None, lease_age=None, beat_age=None, start_age=None, attempt=0
    )
    worked = _run([sys.executable, "-c", PYTHON[1]], dsn)
    assert worked.returncode == 0, worked.stderr
    assert the_job(conn, waiting)["status"] == "done"


def test_every_page_the_readme_names_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing, f"the README leads nowhere: {missing}"
