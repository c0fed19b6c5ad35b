"""CI's own promises: it ends, it says which part was too slow, and it calls no skipped test green."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.assets import REPOSITORY
from tests.cluster.process import wait_until

MAKE = """#!/bin/sh
case $1 in
    test) echo $$ > "$MARKS/slow"; exec sleep 600 ;;
    *) echo "made $1" ;;
esac
"""


def a_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with CI's script and a `make` of our own, whose part `test` hangs."""
    shutil.copytree(REPOSITORY / ".ci", tmp_path / "clone" / ".ci")
    a_program(tmp_path / "clone" / "scripts" / "ci-packages", "#!/bin/sh\n")
    a_program(tmp_path / "bin" / "make", MAKE)
    return tmp_path / "clone"


def start_ci(clone: Path, **variables: str) -> subprocess.Popen[str]:
    path = f"{clone.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.Popen(
        [str(clone / ".ci" / "run")],
        env={**os.environ, "PATH": path, "MARKS": str(clone), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def gone(mark: Path) -> bool:
    """Has the process that wrote its number there ended?"""
    stat = Path("/proc") / mark.read_text().strip() / "stat"
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_part_that_hangs_is_ended_and_named_and_the_rest_still_runs(clone: Path) -> None:
    with start_ci(clone, CI_LIMIT="1") as running:
        output = running.communicate(timeout=60)[0]

    assert running.returncode == 1
    assert re.search(r"test +\d+ s  FAILED: over its limit of 1 s", output)
    assert "made e2e" in output
    assert re.search(r"total +\d+ s", output)
    assert "not green" in output
    assert gone(clone / "slow")


def test_an_interrupted_ci_takes_its_running_part_with_it(clone: Path) -> None:
    with start_ci(clone) as running:
        mark = clone / "slow"
        wait_until(lambda: mark.exists() and bool(mark.read_text()), timeout=30, what="the part that hangs")
        os.kill(running.pid, signal.SIGTERM)
        running.communicate(timeout=30)

    assert running.returncode == 130
    wait_until(lambda: gone(mark), timeout=10, what="the part to end with CI")


def test_every_part_of_ci_has_a_limit() -> None:
    parts = re.findall(r"^part (\w+) (\S+)", (REPOSITORY / ".ci" / "run").read_text(), re.MULTILINE)

    assert [name for name, _ in parts] == ["packages", "setup", "check", "assets", "test", "node"]
    assert all(60 <= int(limit) <= 2400 for _, limit in parts)
