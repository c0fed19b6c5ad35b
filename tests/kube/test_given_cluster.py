"""The same tests run on a cluster that somebody gives us; here another run's API tier plays the stranger."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import kubeconfig
from tests.cluster.api_tier import ApiTier
from tests.cluster.assets import REPOSITORY
from tests.cluster.process import ClusterError

pytestmark = pytest.mark.own_cluster


def test_the_tests_run_on_a_given_kubeconfig_and_leave_out_what_would_hurt_it(api_tier: ApiTier) -> None:
    path = os.pathsep.join([str(api_tier.programs["kubectl"].parent), os.environ["PATH"]])
    argv = [sys.executable, "-m", "pytest", "tests/kube/test_api_tier.py", "tests/kube/test_faults.py", "-q"]
    argv += [f"--kubeconfig={api_tier.kubeconfig}", "-p", "no:cacheprovider", "-p", "no:xdist"]

    run = subprocess.run(
        argv,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PATH": path, "CI": "true"},
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert "API tier ready" not in run.stderr, "it started a server of its own"
    assert " deselected" in run.stdout.splitlines()[-1]
    assert "skipped" not in run.stdout.splitlines()[-1]


def test_a_kubeconfig_without_an_identity_is_refused_with_a_sentence(
    tmp_path: Path, api_tier: ApiTier
) -> None:
    anonymous = api_tier.endpoint.__class__(api_tier.endpoint.server, api_tier.endpoint.ca)
    path = kubeconfig.write(tmp_path / "config", anonymous)

    with pytest.raises(ClusterError, match="neither a client certificate nor a token"):
        kubeconfig.read(path, tmp_path)


def test_a_kubeconfig_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no kubeconfig at"):
        kubeconfig.read(tmp_path / "nowhere", tmp_path)
