"""The same tests on a cluster that is not ours: one given by --kubeconfig, or kind.

Tests that stop an API server, a kubelet or rewrite etcd need a cluster of our own; they are marked
`own_cluster` and are deselected here, because nobody may stop somebody else's API server.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster import kubeconfig
from tests.cluster.api_tier import run_kubectl
from tests.cluster.assets import REPOSITORY
from tests.cluster.images import PRODUCT_IMAGE
from tests.cluster.kube_api import Endpoint, KubeApi
from tests.cluster.process import ClusterError, Process

KIND_NAME = "job-reaper-test"
KIND_CONFIG = REPOSITORY / "manifests" / "kind" / "cluster.yaml"


class GivenCluster:
    """Any cluster whose kubeconfig we were given. We only add namespaces to it, and delete them."""

    image_pull_policy = "IfNotPresent"

    def __init__(self, config: Path, workspace: Path, *, image: str | None, host_address: str | None) -> None:
        self.kubeconfig = config.absolute()
        self.workspace = workspace
        self.image = image
        self.host_address = host_address
        self.api = KubeApi(kubeconfig.read(self.kubeconfig, workspace))
        self._forwarders: list[Process] = []

    @property
    def endpoint(self) -> Endpoint:
        return self.api.endpoint

    def stop(self) -> None:
        """Take back what we opened; the cluster stays."""
        for forwarder in self._forwarders:
            forwarder.stop()
        self.api.close()

    def kubectl(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run kubectl and return what it printed."""
        program = shutil.which("kubectl")
        if program is None:
            raise ClusterError("kubectl is not on PATH")
        return run_kubectl(Path(program), self.kubeconfig, *arguments, timeout=timeout)

    def product_image(self) -> str:
        """The image the pods run: pushed beforehand to where the given cluster can pull it from."""
        if self.image is None:
            raise ClusterError(
                "a given cluster needs --image REFERENCE, an image of this project it can pull"
            )
        return self.image

    def expose(self, host_port: int, *, name: str) -> tuple[str, int]:
        """Let pods reach a port of our loopback, by an address of this machine that they can route to."""
        if self.host_address is None:
            raise ClusterError("pods of a given cluster reach this machine only by --host-address ADDRESS")
        ready = self.workspace / f"forward-{name}.port"
        script = str(Path(__file__).parent / "port_forward.py")
        ends = ["host", self.host_address, "0", "host", "127.0.0.1", str(host_port)]
        argv = [sys.executable, "-I", script, *ends, str(os.getpid()), str(ready)]
        forwarder = Process(f"forward-{name}", argv, self.workspace / f"forward-{name}.log")
        forwarder.start()
        self._forwarders.append(forwarder)
        forwarder.wait_ready(ready.exists, timeout=20, what=f"port forward {name}")
        return self.host_address, int(ready.read_text())


class KindCluster(GivenCluster):
    """kind, where Docker is: made for the run with manifests/kind/, deleted after it."""

    image_pull_policy = "Never"

    def __init__(self, workspace: Path) -> None:
        lacks = kind_lacks()
        if lacks:
            raise ClusterError("; ".join(lacks))
        config = workspace / "kind.kubeconfig"
        create = [
            "kind",
            "create",
            "cluster",
            f"--name={KIND_NAME}",
            f"--config={KIND_CONFIG}",
            f"--kubeconfig={config}",
        ]
        _run(*create, "--wait=180s")
        super().__init__(config, workspace, image=PRODUCT_IMAGE, host_address=_kind_gateway())
        self._loaded = False

    def product_image(self) -> str:
        """Build the Dockerfile with Docker on the public base and load it into the node."""
        if not self._loaded:
            _run("docker", "build", f"--tag={PRODUCT_IMAGE}", str(REPOSITORY))
            _run("kind", "load", "docker-image", PRODUCT_IMAGE, f"--name={KIND_NAME}")
            self._loaded = True
        return PRODUCT_IMAGE

    def stop(self) -> None:
        super().stop()
        _run("kind", "delete", "cluster", f"--name={KIND_NAME}", f"--kubeconfig={self.kubeconfig}")


def kind_lacks() -> list[str]:
    """What is missing for --cluster=kind, with the way to get it."""
    lacks = [
        f"{program} is not on PATH: {how}"
        for program, how in (("kind", "see https://kind.sigs.k8s.io"), ("docker", "install Docker"))
        if shutil.which(program) is None
    ]
    if not lacks and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        lacks.append("docker does not answer: start its daemon, and be in its group")
    return lacks


def _kind_gateway() -> str:
    """This machine's address on Docker's network `kind`, which the pods can route to."""
    answer = json.loads(_run("docker", "network", "inspect", "kind"))
    for entry in answer[0]["IPAM"]["Config"]:
        gateway = str(entry.get("Gateway", ""))
        if gateway and ":" not in gateway:
            return gateway
    raise ClusterError("Docker's network `kind` has no IPv4 gateway")


def _run(*argv: str) -> str:
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    if answer.returncode != 0:
        raise ClusterError(f"{' '.join(argv)} failed with {answer.returncode}: {answer.stderr[-2000:]}")
    return answer.stdout
