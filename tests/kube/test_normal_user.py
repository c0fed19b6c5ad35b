"""The API tier needs no root: it is started here by a user who owns nothing but a temporary directory."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import assets
from tests.cluster.api_tier import ApiTier
from tests.cluster.assets import REPOSITORY
from tests.cluster.process import wait_until
from tests.nobody import a_python_for_everybody

pytestmark = pytest.mark.own_cluster
FORWARDER = REPOSITORY / "tests" / "cluster" / "port_forward.py"
START = """
import os, tempfile
from pathlib import Path
from tests.cluster import assets
from tests.cluster.api_tier import ApiTier
with tempfile.TemporaryDirectory() as directory:
    tier = ApiTier(Path(directory), assets.locate(assets.API_PROGRAMS))
    try:
        tier.start()
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = tier.api.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
        print(os.geteuid(), answer["status"]["userInfo"]["username"])
        print(tier.kubectl("get", "namespace", "default", "--output=name").strip())
    finally:
        tier.stop()
"""


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that everybody may enter: pytest's own are closed."""
    directory = Path(tempfile.mkdtemp(prefix="normal-user-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def the_user() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())


def becoming(user: pwd.struct_passwd) -> dict[str, Any]:
    """What makes a child of root that user's process; a normal user is one already."""
    return {} if os.geteuid() else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def his_python() -> str:
    return sys.executable if os.geteuid() else a_python_for_everybody()


def test_a_normal_user_starts_the_api_tier_and_is_known_to_it(api_tier: ApiTier, open_place: Path) -> None:
    nobody = the_user()
    programs, scratch = open_place / "programs", open_place / "tmp"
    programs.mkdir()
    scratch.mkdir()
    os.chown(scratch, nobody.pw_uid, nobody.pw_gid)
    for name in assets.API_PROGRAMS:
        # Copied, because the cache lies in a home that is closed to others.
        shutil.copy(api_tier.programs[name], programs / name)

    run = subprocess.run(
        [his_python(), "-B", "-c", START],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{sysconfig.get_path('purelib')}",
            "HOME": "/nonexistent",
            "TMPDIR": str(scratch),
            assets.GIVEN_VARIABLE: str(programs),
        },
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        **becoming(nobody),
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{nobody.pw_uid} job-reaper-admin", "namespace/default"]
    assert list(scratch.iterdir()) == []


def test_a_normal_user_forwards_ports_within_his_own_network(open_place: Path) -> None:
    user = the_user()
    os.chown(open_place, user.pw_uid, user.pw_gid)
    ready = open_place / "ready.port"
    with socket.create_server(("127.0.0.1", 0)) as far:
        port = str(far.getsockname()[1])
        ends = ["host", "127.0.0.1", "0", "host", "127.0.0.1", port]
        forwarder = subprocess.Popen(
            [his_python(), "-I", str(FORWARDER), *ends, str(os.getpid()), str(ready)],
            stderr=subprocess.PIPE,
            text=True,
            **becoming(user),
        )
        try:
            wait_until(
                lambda: ready.exists() or forwarder.poll() is not None, timeout=20, what="the forwarder"
            )
            assert ready.exists(), forwarder.communicate()[1]
            with socket.create_connection(("127.0.0.1", int(ready.read_text())), timeout=10) as near:
                near.sendall(b"through")
                far.settimeout(10)
                arrived, _ = far.accept()
                with arrived:
                    assert arrived.recv(100) == b"through"
        finally:
            forwarder.terminate()
            forwarder.communicate(timeout=10)
