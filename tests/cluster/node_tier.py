"""The node tier: a whole Kubernetes node in a sandbox of its own, where pods are processes.

etcd, kube-apiserver, controller-manager, scheduler, containerd, kubelet and kube-proxy, as root, without
Docker. The tests reach the API server through a port on loopback; pods reach what the tests run on loopback
through `expose`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.cluster import control_plane, images, kubeconfig, node_config
from tests.cluster.api_tier import answers_ready, run_kubectl
from tests.cluster.assets import Progress, say
from tests.cluster.kube_api import Endpoint, KubeApi, KubeApiError
from tests.cluster.node_config import API_PORT, NODE_ADDRESS, NODE_NAME
from tests.cluster.process import ClusterError, log_tail, wait_until
from tests.cluster.sandbox import Sandbox

ETCD_PORT = 2379
API_SECONDS = 90.0
NODE_SECONDS = 120.0
# How long after its last sign of life a node counts as lost; upstream waits 50 s.
NODE_GRACE = "12s"


class NodeTier:
    """One node; start it, use it through `api` and `kubectl`, hurt it, stop it."""

    # There is no registry here: an image is on the node or it does not exist.
    image_pull_policy = "Never"

    def __init__(
        self,
        programs: Mapping[str, Path],
        pause_image: Path,
        *,
        outlive_parent: bool = False,
        progress: Progress = say,
    ) -> None:
        self.programs = programs
        self.pause_image = pause_image
        self.progress = progress
        self.sandbox = Sandbox(outlive_parent=outlive_parent)
        self.directory = self.sandbox.directory
        self.kubeconfig = self.directory / "admin.kubeconfig"
        self.pki = control_plane.make_pki(self.directory / "pki", hosts=(NODE_ADDRESS, NODE_NAME))
        self._api: KubeApi | None = None
        self._product_loaded = False

    def start(self) -> None:
        """Start everything and wait until the node is Ready; on failure, leave nothing behind."""
        began = time.monotonic()
        try:
            self.sandbox.start()
            self._make_network()
            self._start_api()
            self.progress(f"API server ready after {time.monotonic() - began:.1f} s")
            self._start_runtime()
            self._start_controllers()
            self._start_kubelet()
            self._wait(self.node_ready, NODE_SECONDS, "the node to be Ready", "kubelet", "containerd")
            self._wait(
                self._default_account, NODE_SECONDS, "the default ServiceAccount", "kube-controller-manager"
            )
            self.progress(f"node ready after {time.monotonic() - began:.1f} s")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the node and remove all traces."""
        if self._api is not None:
            self._api.close()
        self.sandbox.destroy()

    @property
    def api(self) -> KubeApi:
        """Calls as cluster administrator."""
        if self._api is None:
            raise ClusterError("the node was not started")
        return self._api

    @property
    def endpoint(self) -> Endpoint:
        return self.api.endpoint

    def kubectl(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run kubectl as administrator and return what it printed."""
        return run_kubectl(self.programs["kubectl"], self.kubeconfig, *arguments, timeout=timeout)

    def load_image(self, archive: Path) -> None:
        """Import a docker or OCI archive; pods use it with imagePullPolicy Never."""
        self.sandbox.run(
            "ctr", "--namespace=k8s.io", "images", "import", "--no-unpack", str(archive), timeout=300
        )

    def product_image(self) -> str:
        """Build the project's Dockerfile, import the image once, and return its reference."""
        if not self._product_loaded:
            began = time.monotonic()
            self.load_image(images.product_image(self.progress))
            self._product_loaded = True
            self.progress(f"{images.PRODUCT_IMAGE} on the node after {time.monotonic() - began:.1f} s")
        return images.PRODUCT_IMAGE

    def expose(self, host_port: int, *, name: str) -> tuple[str, int]:
        """Let pods reach a port of the machine's loopback; returns the address and port they must use."""
        inner = self.sandbox.expose(
            name, inner_address=NODE_ADDRESS, inner_port=host_port, host_port=host_port
        )
        return NODE_ADDRESS, inner

    def reach(self, address: str, port: int, *, name: str) -> int:
        """Let the tests reach a pod's or Service's port; returns the port on loopback."""
        return self.sandbox.reach(name, inner_address=address, inner_port=port)

    def node_ready(self) -> bool:
        """Is the node registered and Ready?"""
        try:
            node = self.api.get(f"/api/v1/nodes/{NODE_NAME}")
        except KubeApiError as error:
            if error.status == 404:
                return False
            raise
        conditions = node.get("status", {}).get("conditions", [])
        return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)

    def pause_kubelet(self) -> None:
        """The node falls silent; its containers go on. Lost node, as the control plane sees it."""
        self.sandbox.signal_daemon("kubelet", signal.SIGSTOP)

    def resume_kubelet(self) -> None:
        """The node is heard again."""
        self.sandbox.signal_daemon("kubelet", signal.SIGCONT)

    def stop_apiserver(self) -> None:
        """An API outage: pods and tests get no answer until start_apiserver()."""
        # Asked politely, it would wait a minute for the watches of kubelet and controllers.
        self.sandbox.stop_daemon("kube-apiserver", grace=0)

    def start_apiserver(self) -> None:
        """End of the outage."""
        self._run_apiserver()
        self._wait_api()

    def kill_container(self, namespace: str, pod: str, container: str) -> None:
        """Kill a container's first process from outside Kubernetes, as a crash or the kernel would."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        for status in self.api.get(path)["status"].get("containerStatuses", []):
            if status["name"] == container and status.get("containerID"):
                task = status["containerID"].removeprefix("containerd://")
                self.sandbox.run("ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", task)
                return
        raise ClusterError(f"{namespace}/{pod} has no running container {container}")

    def _make_network(self) -> None:
        with (self.directory / "hosts").open("a") as hosts:
            hosts.write(f"{NODE_ADDRESS} {NODE_NAME}\n")
        run = self.sandbox.run
        run("hostname", NODE_NAME)
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", node_config.BRIDGE, "type", "bridge")
        run("ip", "address", "add", f"{NODE_ADDRESS}/16", "dev", node_config.BRIDGE)
        run("ip", "link", "set", node_config.BRIDGE, "up")
        # Service addresses are routed to the bridge, where nftables rewrites them: processes of the node
        # need them too.
        run("ip", "route", "add", control_plane.SERVICE_CIDR, "dev", node_config.BRIDGE)

    def _start_api(self) -> None:
        data = self.directory / "var-lib" / "etcd"
        etcd = control_plane.etcd_argv(
            self.programs["etcd"], data=data, address="127.0.0.1", port=ETCD_PORT, peer_port=ETCD_PORT + 1
        )
        self.sandbox.start_daemon("etcd", etcd)
        self._run_apiserver()
        port = self.sandbox.reach("api", inner_address=NODE_ADDRESS, inner_port=API_PORT)
        admin = self.pki.admin
        endpoint = Endpoint(f"https://127.0.0.1:{port}", self.pki.authority.cert, admin.cert, admin.key)
        self._api = KubeApi(endpoint)
        kubeconfig.write(self.kubeconfig, endpoint)
        self._wait_api()

    def _run_apiserver(self) -> None:
        argv = control_plane.apiserver_argv(
            self.programs["kube-apiserver"],
            self.pki,
            etcd=f"http://127.0.0.1:{ETCD_PORT}",
            bind="0.0.0.0",
            advertise=NODE_ADDRESS,
            port=API_PORT,
            certificates=self.directory / "pki",
            # The node's name is in its own hosts file; so logs and exec work without DNS.
            extra={"kubelet-preferred-address-types": "InternalIP,Hostname"},
        )
        self.sandbox.start_daemon("kube-apiserver", argv)

    def _start_runtime(self) -> None:
        configs = self.directory / "config"
        (configs / "cni").mkdir(parents=True)
        (configs / "cni" / "10-job-reaper.conflist").write_text(node_config.cni())
        (configs / "containerd.toml").write_text(node_config.containerd(configs / "cni"))
        self.sandbox.start_daemon("containerd", ["containerd", f"--config={configs / 'containerd.toml'}"])
        self._wait(self._runtime_answers, 60, "containerd to answer", "containerd")
        self.load_image(self.pause_image)

    def _start_controllers(self) -> None:
        config = self._client("controller-manager", "system:kube-controller-manager")
        self.sandbox.start_daemon(
            "kube-controller-manager",
            [
                str(self.programs["kube-controller-manager"]),
                f"--kubeconfig={config}",
                f"--authentication-kubeconfig={config}",
                f"--authorization-kubeconfig={config}",
                f"--root-ca-file={self.pki.authority.cert}",
                f"--service-account-private-key-file={self.pki.service_accounts.key}",
                f"--cert-dir={self.directory / 'pki'}",
                "--use-service-account-credentials=true",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                "--node-monitor-period=1s",
                f"--node-monitor-grace-period={NODE_GRACE}",
            ],
        )
        config = self._client("scheduler", "system:kube-scheduler")
        self.sandbox.start_daemon(
            "kube-scheduler",
            [
                str(self.programs["kube-scheduler"]),
                f"--kubeconfig={config}",
                f"--authentication-kubeconfig={config}",
                f"--authorization-kubeconfig={config}",
                f"--cert-dir={self.directory / 'pki'}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
            ],
        )

    def _start_kubelet(self) -> None:
        configs = self.directory / "config"
        resolv_conf = configs / "resolv.conf"
        resolv_conf.write_text("")
        serving = self.pki.authority.issue("kubelet-serving", NODE_NAME, hosts=(NODE_NAME, NODE_ADDRESS))
        text = node_config.kubelet(
            self.pki, serving, self.sandbox.state.group, resolv_conf, self.directory / "volume-plugins"
        )
        (configs / "kubelet.yaml").write_text(text)
        config = self._client("kubelet", f"system:node:{NODE_NAME}", organization="system:nodes")
        self.sandbox.start_daemon(
            "kubelet",
            [
                str(self.programs["kubelet"]),
                f"--config={configs / 'kubelet.yaml'}",
                f"--kubeconfig={config}",
                f"--hostname-override={NODE_NAME}",
                f"--node-ip={NODE_ADDRESS}",
            ],
        )
        proxy = self._client("kube-proxy", "system:kube-proxy")
        (configs / "kube-proxy.yaml").write_text(node_config.kube_proxy(proxy))
        argv = [str(self.programs["kube-proxy"]), f"--config={configs / 'kube-proxy.yaml'}"]
        self.sandbox.start_daemon("kube-proxy", argv)

    def _client(self, name: str, user: str, *, organization: str | None = None) -> Path:
        """A kubeconfig for a part of the node: its own certificate, so that RBAC judges it by what it is."""
        pair = self.pki.authority.issue(name, user, organization=organization)
        endpoint = Endpoint(
            f"https://{NODE_ADDRESS}:{API_PORT}", self.pki.authority.cert, pair.cert, pair.key
        )
        return kubeconfig.write(self.directory / f"{name}.kubeconfig", endpoint)

    def _runtime_answers(self) -> bool:
        try:
            self.sandbox.run("ctr", "version", timeout=5)
        except ClusterError:
            return False
        return True

    def _default_account(self) -> bool:
        return self.api.exists("/api/v1/namespaces/default/serviceaccounts/default")

    def _wait_api(self) -> None:
        self._wait(lambda: answers_ready(self.api), API_SECONDS, "/readyz", "kube-apiserver", "etcd")

    def _wait(self, condition: Callable[[], bool], timeout: float, what: str, *daemons: str) -> None:
        """Wait, but no longer than the daemons live; their last words are in the error."""

        def check() -> bool:
            dead = [name for name in daemons if name not in self.sandbox.daemons()]
            if dead:
                raise ClusterError(f"{', '.join(dead)} ended")
            return condition()

        try:
            wait_until(check, timeout=timeout, what=what, interval=0.2)
        except ClusterError as error:
            words = "\n".join(f"--- {name} ---\n{log_tail(self.sandbox.log(name))}" for name in daemons)
            raise ClusterError(f"{error}, waiting for {what}\n{words}") from None
