"""Smoke tests of the node tier: pods are processes here, and they are hurt as processes are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reconciler.demo.postgres import EmbeddedPostgres
from tests.cluster.kube_api import Json
from tests.cluster.namespace import Namespace
from tests.cluster.node_config import NODE_NAME
from tests.cluster.node_tier import NodeTier
from tests.cluster.plugin import NodeCluster
from tests.cluster.process import wait_until
from tests.e2e.workloads import POD_SECONDS, a_python_pod, python_container, wait_for_phase

READ_PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]
# By the Service's address and the pod's own token, as the product's client does it inside a cluster.
ASK_THE_API = """
import json, os, ssl, sys, urllib.error, urllib.request
home = "/var/run/secrets/kubernetes.io/serviceaccount/"
token, namespace = open(home + "token").read(), open(home + "namespace").read()
context = ssl.create_default_context(cafile=home + "ca.crt")
base = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
for path in (f"/api/v1/namespaces/{namespace}/pods", f"/api/v1/namespaces/{namespace}/secrets"):
    request = urllib.request.Request(base + path, headers={"Authorization": "Bearer " + token})
    try:
        print(path.rsplit("/", 1)[1], urllib.request.urlopen(request, timeout=10, context=context).status)
    except urllib.error.HTTPError as error:
        print(path.rsplit("/", 1)[1], error.code)
"""
ASK_POSTGRES = """
import psycopg, sys
with psycopg.connect(sys.argv[1], connect_timeout=10) as connection:
    print("answer", connection.execute("select 6 * 7").fetchone()[0])
"""
SLEEP = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"


@pytest.fixture(scope="module")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A Postgres on the machine's loopback, as the integration tests use it."""
    with EmbeddedPostgres(listen=("127.0.0.1",)) as server:
        yield server


def log_of(cluster: NodeCluster, namespace: Namespace, pod: str) -> str:
    return cluster.kubectl("logs", pod, f"--namespace={namespace.name}")


def taints_of_loss(node_tier: NodeTier) -> set[str]:
    """The taints that mark a lost node; another controller adds them some time after Ready has flipped."""
    taints = node_tier.api.get(f"/api/v1/nodes/{NODE_NAME}")["spec"].get("taints", [])
    return {taint["key"] for taint in taints} & {
        "node.kubernetes.io/unreachable",
        "node.kubernetes.io/not-ready",
    }


def test_a_cronjobs_pod_completes_and_its_log_is_read_through_kubectl(
    node_cluster: NodeCluster, node_namespace: Namespace, product_image: str
) -> None:
    container = python_container(node_cluster, product_image, "print('hello from a CronJob')")
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    cronjob: Json = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "every-minute"},
        "spec": {"schedule": "* * * * *", "jobTemplate": {"spec": {"template": template, "backoffLimit": 0}}},
    }
    api, pods = node_namespace.api, f"{node_namespace.path}/pods"
    api.create(f"/apis/batch/v1/namespaces/{node_namespace.name}/cronjobs", cronjob)

    wait_until(
        lambda: bool(api.get(pods)["items"]),
        # The next full minute may be 60 s away, and two busy cores may need long to notice it.
        timeout=120,
        what="the CronJob controller to start a pod",
        interval=0.5,
    )
    pod = str(api.get(pods)["items"][0]["metadata"]["name"])
    wait_for_phase(api, f"{pods}/{pod}", "Succeeded", "Failed")

    assert log_of(node_cluster, node_namespace, pod) == "hello from a CronJob\n"
    assert api.get(f"{pods}/{pod}")["status"]["phase"] == "Succeeded"


def test_a_pod_asks_the_api_by_its_service_address_and_gets_what_its_role_allows(
    node_cluster: NodeCluster, node_namespace: Namespace, product_image: str
) -> None:
    node_namespace.account("reader", READ_PODS)
    container = python_container(node_cluster, product_image, ASK_THE_API)
    node_namespace.create_pod(a_python_pod("asker", container, serviceAccountName="reader"))

    wait_for_phase(node_namespace.api, f"{node_namespace.path}/pods/asker", "Succeeded", "Failed")

    assert log_of(node_cluster, node_namespace, "asker").splitlines() == ["pods 200", "secrets 403"]


def test_a_pod_reaches_postgres(
    node_cluster: NodeCluster, node_namespace: Namespace, product_image: str, postgres: EmbeddedPostgres
) -> None:
    address, port = node_cluster.expose(postgres.port, name="postgres-smoke")
    dsn = f"host={address} port={port} user=postgres dbname=postgres password={postgres.password}"
    container = python_container(node_cluster, product_image, ASK_POSTGRES, dsn)
    node_namespace.create_pod(a_python_pod("client", container))

    wait_for_phase(node_namespace.api, f"{node_namespace.path}/pods/client", "Succeeded", "Failed")

    assert log_of(node_cluster, node_namespace, "client") == "answer 42\n"


@pytest.mark.own_cluster
def test_killing_a_container_raises_its_restart_count(
    node_tier: NodeTier, node_namespace: Namespace, product_image: str
) -> None:
    container = python_container(node_tier, product_image, SLEEP)
    path = f"{node_namespace.path}/pods/victim"
    node_namespace.create_pod(a_python_pod("victim", container, restartPolicy="Always"))
    before = wait_for_phase(node_namespace.api, path, "Running")["status"]["containerStatuses"][0]

    node_tier.kill_container(node_namespace.name, "victim", "main")

    def restarted() -> bool:
        status = node_namespace.pod("victim")["status"]["containerStatuses"][0]
        return bool(status["restartCount"] == 1 and "running" in status["state"])

    wait_until(restarted, timeout=POD_SECONDS, what="the container to be restarted", interval=0.2)
    after = node_namespace.pod("victim")["status"]["containerStatuses"][0]
    assert before["restartCount"] == 0
    assert after["containerID"] != before["containerID"]
    assert after["lastState"]["terminated"]["exitCode"] == 137


def test_a_memory_limit_is_enforced_by_the_kernel(
    node_cluster: NodeCluster, node_namespace: Namespace, product_image: str
) -> None:
    container = python_container(node_cluster, product_image, "hog = bytearray(400_000_000); print(len(hog))")
    container["resources"] = {"limits": {"memory": "64Mi"}}
    node_namespace.create_pod(a_python_pod("hog", container))

    pod = wait_for_phase(node_namespace.api, f"{node_namespace.path}/pods/hog", "Succeeded", "Failed")

    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"


def test_a_service_leads_to_the_pods_behind_it(
    node_cluster: NodeCluster, node_namespace: Namespace, product_image: str
) -> None:
    serve = python_container(node_cluster, product_image, "", "")
    serve["command"] = ["/opt/job-reaper/bin/python", "-m", "http.server", "8080", "--directory", "/opt"]
    server = a_python_pod("server", serve)
    server["metadata"]["labels"] = {"app": "server"}
    node_namespace.create_pod(server)
    wait_for_phase(node_namespace.api, f"{node_namespace.path}/pods/server", "Running")
    service = {
        "metadata": {"name": "server"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    address = node_namespace.api.create(f"{node_namespace.path}/services", service)["spec"]["clusterIP"]
    ask = (
        "import sys, time, urllib.request\n"
        "deadline = time.monotonic() + 30\n"
        "while True:\n"
        "    try:\n"
        "        print(urllib.request.urlopen('http://' + sys.argv[1], timeout=3).status); break\n"
        "    except OSError:\n"
        "        if time.monotonic() > deadline: raise\n"
        "        time.sleep(0.2)\n"
    )
    node_namespace.create_pod(
        a_python_pod("asker", python_container(node_cluster, product_image, ask, address))
    )

    wait_for_phase(node_namespace.api, f"{node_namespace.path}/pods/asker", "Succeeded", "Failed")

    assert log_of(node_cluster, node_namespace, "asker") == "200\n"


@pytest.mark.own_cluster
def test_an_api_outage_ends_and_the_node_is_still_there(node_tier: NodeTier) -> None:
    node_tier.stop_apiserver()
    node_tier.start_apiserver()

    wait_until(node_tier.node_ready, timeout=60, what="the node to be Ready after the outage", interval=0.2)


@pytest.mark.own_cluster
def test_stopping_the_kubelet_makes_the_node_not_ready_and_resuming_heals_it(node_tier: NodeTier) -> None:
    assert node_tier.node_ready()
    node_tier.pause_kubelet()
    try:
        wait_until(
            lambda: not node_tier.node_ready() and bool(taints_of_loss(node_tier)),
            timeout=60,
            what="the node to be NotReady and tainted",
            interval=0.2,
        )
    finally:
        node_tier.resume_kubelet()
    wait_until(node_tier.node_ready, timeout=60, what="the node to be Ready again", interval=0.2)
