"""A tier that cannot run says what is missing and how to get it; in CI that is a failure and not a skip."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import elsewhere, preflight
from tests.cluster.assets import REPOSITORY
from tests.cluster.plugin import unavailable

NOBODY = 65534


def as_a_normal_user(question: Callable[[], object]) -> str:
    """Ask in a child process that has given up root; as a normal user, ask at once."""
    if os.geteuid() != 0:
        return str(question())
    answer, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(write, str(question()).encode())
        except Exception:  # noqa: BLE001 - the child must not go on as a second pytest; its words are the answer
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(answer) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text


def test_as_a_normal_user_the_node_tier_says_why_not_and_what_to_do() -> None:
    reasons = as_a_normal_user(preflight.node_tier_lacks)

    assert "a kubelet needs root" in reasons
    assert "sudo make e2e" in reasons
    assert "--kubeconfig" in reasons


def test_missing_programs_are_named_by_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preflight.PACKAGES, "no-such-program", "no-such-package")

    assert "no-such-package" in preflight.missing_packages()


def test_the_reason_says_how_to_get_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    # A normal user is refused before packages are looked at; only the question is asked as root.
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setitem(preflight.PACKAGES, "no-such-program", "no-such-package")

    [reason] = [text for text in preflight.node_tier_lacks() if "packages" in text]

    assert "no-such-package" in reason
    assert "make cluster-assets" in reason or "install" in reason


def test_a_compiler_without_a_static_libc_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho libc.a\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(preflight, "SYSTEM_PATH", os.environ["PATH"])

    assert "libc6-dev" in preflight.missing_packages()
    compiler.write_text("#!/bin/sh\necho /usr/lib/libc.a\n")
    assert "libc6-dev" not in preflight.missing_packages()


def test_both_tiers_get_openssl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SYSTEM_PATH", str(tmp_path))
    assert "openssl" in preflight.missing_packages()

    # A machine with nothing, where apt-get only writes down what it was asked for.
    for name, text in {"apt-get": 'echo "$@" >> "$ASKED"', "id": "echo 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("ls", "mktemp", "rm", "chmod", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    asked = tmp_path / "asked"
    subprocess.run(
        ["/bin/sh", str(REPOSITORY / "scripts" / "ci-packages")],
        env={"PATH": str(tmp_path), "ASKED": str(asked), "POLICY_RC_D": str(tmp_path / "policy")},
        check=True,
        capture_output=True,
    )
    assert "openssl" in asked.read_text().split()


def test_the_image_names_no_registry() -> None:
    base = re.search(r"^ARG BASE=(\S+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)

    assert base is not None
    assert base[1] == "python:3.11-slim-bookworm"


def test_a_disk_that_is_too_small_is_named_with_the_way_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("JOB_REAPER_CACHE", str(tmp_path / "not" / "made" / "yet"))
    assert not [text for text in preflight.disk_lacks() if "JOB_REAPER_CACHE" in text]
    monkeypatch.setattr(preflight, "FREE_GIGABYTES", 10**9)

    reasons = " ".join(preflight.node_tier_lacks())

    assert f"{tmp_path / 'not' / 'made' / 'yet'} has " in reasons
    assert "GB are needed: make room, or set JOB_REAPER_CACHE" in reasons
    assert "or set TMPDIR" in reasons


@pytest.mark.parametrize("value", ["", "0", "false", "False"])
def test_without_ci_it_is_a_skip_with_the_reason(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CI", value)

    with pytest.raises(pytest.skip.Exception, match="node tier cannot run here: no root"):
        unavailable("node tier", "no root")


@pytest.mark.parametrize("value", ["true", "1", "True", "woodpecker"])
def test_in_ci_it_is_a_failure_with_the_reason(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CI", value)

    with pytest.raises(pytest.fail.Exception, match="node tier cannot run here: no root"):
        unavailable("node tier", "no root")


def test_kind_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    lacks = " ".join(elsewhere.kind_lacks())

    assert "kind is not on PATH" in lacks
    assert "docker is not on PATH" in lacks
