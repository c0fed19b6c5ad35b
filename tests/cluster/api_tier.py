"""The API tier: etcd and kube-apiserver on loopback, ready in seconds, as any user.

No controller, no scheduler, no kubelet: a pod is an object, and it is what the test says it is. Everything
else is real: certificates, tokens, RBAC, admission, watches, resource versions, conflicts.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import urllib3

from tests.cluster import control_plane, kubeconfig
from tests.cluster.kube_api import Endpoint, Json, KubeApi, KubeApiError
from tests.cluster.process import ClusterError, Process, log_tail

LOOPBACK = "127.0.0.1"
START_SECONDS = 60.0
# Another process may take a port between our look and the server's bind; then we look again.
PORT_TRIES = 3
# A company's proxy in the environment must not be asked for our own loopback.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ApiTier:
    """One etcd and one kube-apiserver in a directory of their own."""

    def __init__(self, directory: Path, programs: Mapping[str, Path]) -> None:
        self.directory = directory
        self.programs = programs
        self.kubeconfig = directory / "admin.kubeconfig"
        self.started_in = 0.0
        self.pki = control_plane.make_pki(directory / "pki", hosts=())
        self._etcd: Process | None = None
        self._apiserver: Process | None = None
        self._etcd_url = ""
        self._api: KubeApi | None = None

    def start(self) -> None:
        """Start both and wait until the API server says it is ready and its RBAC bootstrap is done."""
        began = time.monotonic()
        for attempt in range(1, PORT_TRIES + 1):
            try:
                self._start_once()
                break
            except ClusterError:
                lost_port = any(
                    "address already in use" in log_tail(log) for log in self.directory.glob("*.log")
                )
                self.stop()
                if not lost_port or attempt == PORT_TRIES:
                    raise
        self.started_in = time.monotonic() - began

    def stop(self) -> None:
        """Stop both, the API server first: without its etcd it would only complain for a minute."""
        if self._api is not None:
            self._api.close()
        for process in (self._apiserver, self._etcd):
            if process is not None:
                process.stop()

    @property
    def api(self) -> KubeApi:
        """Calls as cluster administrator."""
        if self._api is None:
            raise ClusterError("the API tier was not started")
        return self._api

    @property
    def endpoint(self) -> Endpoint:
        return self.api.endpoint

    def kubectl(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run kubectl as administrator and return what it printed."""
        return run_kubectl(self.programs["kubectl"], self.kubeconfig, *arguments, timeout=timeout)

    def stop_apiserver(self) -> None:
        """An API outage: connections are refused until start_apiserver()."""
        self._server.stop()

    def kill_apiserver(self) -> None:
        """An API server that crashes: open connections are cut."""
        self._server.kill()

    def start_apiserver(self) -> None:
        """End of the outage: same address, same data, same certificates."""
        self._server.start()
        self._wait_ready()

    def rewrite(self, resource: str, namespace: str, name: str, change: Callable[[Json], None]) -> None:
        """Change a stored object behind the API's back, for stamps that no API call can set.

        The API server sees it as an ordinary update (new resource version, watch event). For
        creationTimestamp and deletionTimestamp only; what an API call can do, a test does by an API call.
        """
        key = base64.b64encode(f"/registry/{resource}/{namespace}/{name}".encode()).decode()
        found = self._etcd_call("range", {"key": key}).get("kvs")
        if not found:
            raise ClusterError(f"etcd holds no {resource} {namespace}/{name}")
        stored = json.loads(base64.b64decode(found[0]["value"]))
        change(stored)
        unchanged = [{"key": key, "target": "MOD", "mod_revision": found[0]["mod_revision"]}]
        value = base64.b64encode(json.dumps(stored).encode()).decode()
        put = [{"request_put": {"key": key, "value": value}}]
        if not self._etcd_call("txn", {"compare": unchanged, "success": put}).get("succeeded"):
            raise ClusterError(f"{resource} {namespace}/{name} changed while it was rewritten")

    @property
    def _server(self) -> Process:
        if self._apiserver is None:
            raise ClusterError("the API tier was not started")
        return self._apiserver

    def _start_once(self) -> None:
        port, etcd_port, peer_port = free_ports(3)
        self._etcd_url = f"http://{LOOPBACK}:{etcd_port}"
        data = self.directory / f"etcd-{etcd_port}"
        argv = control_plane.etcd_argv(
            self.programs["etcd"], data=data, address=LOOPBACK, port=etcd_port, peer_port=peer_port
        )
        self._etcd = Process("etcd", argv, self.directory / "etcd.log")
        self._etcd.start()
        self._etcd.wait_ready(self._etcd_answers, timeout=START_SECONDS, what="etcd to answer")
        argv = control_plane.apiserver_argv(
            self.programs["kube-apiserver"],
            self.pki,
            etcd=self._etcd_url,
            bind=LOOPBACK,
            advertise=LOOPBACK,
            port=port,
            certificates=self.directory / "pki",
            # The Service `kubernetes` cannot point to loopback; nothing routes Service addresses here anyway.
            extra={"endpoint-reconciler-type": "none"},
        )
        self._apiserver = Process("kube-apiserver", argv, self.directory / "kube-apiserver.log")
        self._apiserver.start()
        admin = self.pki.admin
        endpoint = Endpoint(f"https://{LOOPBACK}:{port}", self.pki.authority.cert, admin.cert, admin.key)
        self._api = KubeApi(endpoint)
        kubeconfig.write(self.kubeconfig, endpoint)
        self._wait_ready()

    def _wait_ready(self) -> None:
        self._server.wait_ready(lambda: answers_ready(self.api), timeout=START_SECONDS, what="/readyz")

    def _etcd_answers(self) -> bool:
        try:
            with DIRECT.open(f"{self._etcd_url}/health", timeout=2) as answer:
                return bool(json.load(answer)["health"] == "true")
        except OSError:
            return False

    def _etcd_call(self, operation: str, body: Json) -> Json:
        request = urllib.request.Request(
            f"{self._etcd_url}/v3/kv/{operation}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with DIRECT.open(request, timeout=10) as answer:
            return dict(json.load(answer))


def answers_ready(api: KubeApi) -> bool:
    """Does /readyz say ok? Refused and 5xx are a no; a wrong certificate is an error."""
    try:
        return api.text("/readyz") == "ok"
    except KubeApiError:
        return False
    except urllib3.exceptions.SSLError as error:
        # A handshake cut off is a server on its way; a certificate that does not verify is a mistake.
        if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in error.args):
            raise
        return False
    except urllib3.exceptions.HTTPError:
        return False


def run_kubectl(program: Path, config: Path, *arguments: str, timeout: float = 60.0) -> str:
    """kubectl with an explicit kubeconfig, its error text in the exception."""
    argv = [str(program), f"--kubeconfig={config}", *arguments]
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
    if answer.returncode != 0:
        raise ClusterError(
            f"kubectl {' '.join(arguments)} failed with {answer.returncode}: {answer.stderr.strip()}"
        )
    return answer.stdout


def free_ports(count: int) -> list[int]:
    """Ports that are free now; held together while we look, so that they differ."""
    held = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in held]
    for listener in held:
        listener.close()
    return ports
