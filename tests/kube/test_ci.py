"""CI's own promises: it ends, it says which part was too slow, and it calls no skipped test green."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.assets import REPOSITORY
from tests.cluster.process import wait_until

MAKE = """#!/bin/sh
case $1 in
    test) echo $$ > "$MARKS/slow"; exec sleep 600 ;;
    *) echo "made $1"; grep SigIgn "/proc/$$/status" ;;
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


def test_the_parts_can_be_interrupted_also_when_ci_runs_in_the_background(clone: Path) -> None:
    """A shell starts what runs in the background deaf to Ctrl-C, and its children inherit that.

    Tests that interrupt a program would wait for ever for its end.
    """
    script = clone / ".ci" / "run"
    script.rename(clone / ".ci" / "real")
    a_program(script, f"#!/bin/sh\ntrap '' INT QUIT\nexec {clone / '.ci' / 'real'}\n")

    with start_ci(clone, CI_LIMIT="1") as running:
        output = running.communicate(timeout=60)[0]

    masks = [int(mask, 16) for mask in re.findall(r"SigIgn:\s+(\w+)", output)]
    deaf = {1 << (number - 1) for number in (signal.SIGINT, signal.SIGQUIT)}
    assert len(masks) == 4
    assert not [mask for mask in masks if any(mask & bit for bit in deaf)]


def test_every_part_of_ci_has_a_limit() -> None:
    parts = re.findall(r"^part (\w+) (\S+)", (REPOSITORY / ".ci" / "run").read_text(), re.MULTILINE)

    assert [name for name, _ in parts] == ["packages", "setup", "check", "assets", "test", "node"]
    assert all(60 <= int(limit) <= 2400 for _, limit in parts)


ONE_SKIP = """
import pytest
def test_green() -> None: ...
@pytest.mark.skip(reason="not here")
def test_not_run() -> None: ...
"""


@pytest.fixture
def tiers(tmp_path: Path) -> Path:
    """A directory with the test script and one tier, whose second test is skipped; tests/kube is missing."""
    for name in ("scripts/test", "tests/ci.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    a_program(tmp_path / "scripts" / "setup", "#!/bin/sh\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    a_program(tmp_path / ".venv" / "bin" / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "tests" / "unit").mkdir()
    (tmp_path / "tests" / "unit" / "test_some.py").write_text(ONE_SKIP)
    return tmp_path


def run_tiers(tiers: Path, ci: str, *names: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [str(tiers / "scripts" / "test"), *names],
        env={**environment, "CI": ci, "PYTHONPATH": str(tiers)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("false", 0), ("true", 1), ("1", 1)])
def test_ci_calls_no_skipped_test_green(tiers: Path, ci: str, code: int) -> None:
    run = run_tiers(tiers, ci, "unit")

    assert run.returncode == code, run.stdout + run.stderr
    assert "1 passed    0 failed    1 skipped" in run.stdout
    assert run.stdout.splitlines()[-1] == "1 passed, 0 failed"
    assert ("1 skipped: CI skips nothing" in run.stdout) is bool(code)


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_ci_leaves_out_no_tier(tiers: Path, ci: str, code: int) -> None:
    (tiers / "tests" / "unit" / "test_some.py").write_text("def test_green() -> None: ...\n")

    run = run_tiers(tiers, ci, "unit", "kube")

    assert run.returncode == code, run.stdout + run.stderr
    assert "kube: no tests/kube here" in run.stdout
    assert ("missing: CI leaves out no tier" in run.stdout) is bool(code)


def test_make_e2e_goes_the_same_way() -> None:
    targets = (REPOSITORY / "tests" / "cluster" / "cluster.mk").read_text()

    assert "scripts/test e2e\n" in targets
    assert "-m pytest" not in targets
