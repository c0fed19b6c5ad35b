"""Smoke tests of the API tier: what every later test of Kubernetes relies on is shown here once."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.cluster import pods
from tests.cluster.api_tier import ApiTier
from tests.cluster.kube_api import Json, KubeApi, KubeApiError
from tests.cluster.namespace import Namespace
from tests.cluster.plugin import Cluster

READ_PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def as_account(namespace: Namespace, rules: list[dict[str, list[str]]]) -> KubeApi:
    return KubeApi(namespace.account(rules=rules).endpoint())


@pytest.mark.own_cluster
def test_the_api_server_is_ready_within_seconds(api_tier: ApiTier) -> None:
    assert api_tier.started_in < 30


def test_kubectl_speaks_to_the_cluster(api_cluster: Cluster, namespace: Namespace) -> None:
    namespace.create_pod("seen-by-kubectl")

    assert "seen-by-kubectl" in api_cluster.kubectl("get", "pods", f"--namespace={namespace.name}")


def test_each_test_gets_a_namespace_of_its_own(api_cluster: Cluster, namespace: Namespace) -> None:
    other = Namespace(api_cluster.api)
    namespace.create_pod("worker-0")

    assert other.name != namespace.name
    assert api_cluster.api.get(f"{other.path}/pods")["items"] == []
    other.remove()


def test_a_pod_is_what_the_test_says_it_is(namespace: Namespace) -> None:
    oom = pods.termination(exit_code=137, reason="OOMKilled")
    namespace.create_pod("worker-0")

    namespace.set_status(
        "worker-0",
        phase="Running",
        containers=[pods.waiting(restarts=3, last=oom)],
        conditions=[pods.condition("Ready", False, reason="ContainersNotReady")],
    )

    pod = namespace.pod("worker-0")
    container = pod["status"]["containerStatuses"][0]
    assert pod["spec"]["nodeName"] == pods.NO_SUCH_NODE
    assert pod["status"]["phase"] == "Running"
    assert pod["status"]["conditions"][0]["reason"] == "ContainersNotReady"
    assert container["restartCount"] == 3
    assert container["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert container["lastState"]["terminated"]["exitCode"] == 137


def test_a_pod_under_deletion_stays_until_its_kubelet_confirms(namespace: Namespace) -> None:
    namespace.create_pod("draining")

    namespace.begin_deletion("draining", grace_seconds=600)

    pod = namespace.pod("draining")
    ends = datetime.fromisoformat(pod["metadata"]["deletionTimestamp"])
    assert 500 < (ends - datetime.now(UTC)).total_seconds() < 660


def test_a_forced_deletion_removes_the_object_at_once(namespace: Namespace, api_cluster: Cluster) -> None:
    namespace.create_pod("gone")

    namespace.delete_now("gone")

    assert not api_cluster.api.exists(f"{namespace.path}/pods/gone")


@pytest.mark.own_cluster
def test_stamps_can_be_put_into_the_past(namespace: Namespace) -> None:
    namespace.create_pod("old")
    namespace.begin_deletion("old", grace_seconds=30)

    pod = namespace.date_back("old", created=7200, deletion=600)

    now = datetime.now(UTC)
    created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    deleted = datetime.fromisoformat(pod["metadata"]["deletionTimestamp"])
    assert 7190 < (now - created).total_seconds() < 7300
    assert 590 < (now - deleted).total_seconds() < 700


@pytest.mark.own_cluster
def test_a_rewritten_stamp_reaches_a_watch_as_an_ordinary_change(
    api_tier: ApiTier, namespace: Namespace
) -> None:
    version = namespace.create_pod("watched")["metadata"]["resourceVersion"]
    namespace.date_back("watched", created=3600)

    events = list(api_tier.api.watch(f"{namespace.path}/pods", seconds=1, resourceVersion=version))

    assert [event["type"] for event in events] == ["MODIFIED"]


def test_an_account_may_do_what_its_role_says_and_nothing_else(namespace: Namespace) -> None:
    namespace.create_pod("worker-0")
    reader = as_account(namespace, READ_PODS)

    assert reader.get(f"{namespace.path}/pods/worker-0")["metadata"]["name"] == "worker-0"
    with pytest.raises(KubeApiError) as refused:
        reader.delete(f"{namespace.path}/pods/worker-0")
    assert refused.value.status == 403
    with pytest.raises(KubeApiError) as elsewhere:
        reader.get("/api/v1/namespaces/kube-system/pods")
    assert elsewhere.value.status == 403
    reader.close()


def test_an_account_without_a_role_is_refused(namespace: Namespace) -> None:
    stranger = as_account(namespace, [])

    with pytest.raises(KubeApiError) as refused:
        stranger.get(f"{namespace.path}/pods")
    assert refused.value.status == 403
    stranger.close()


def test_a_dropped_binding_means_403_until_it_is_bound_again(namespace: Namespace) -> None:
    account = namespace.account(rules=READ_PODS)
    reader = KubeApi(account.endpoint())
    reader.get(f"{namespace.path}/pods")

    account.drop()
    wait_for_status(reader, f"{namespace.path}/pods", 403)
    account.bind()
    wait_for_status(reader, f"{namespace.path}/pods", 200)
    reader.close()


def test_a_forged_token_is_not_an_identity(api_cluster: Cluster, namespace: Namespace) -> None:
    genuine = namespace.account(rules=READ_PODS).endpoint()
    assert genuine.token is not None
    head, body, signature = genuine.token.split(".")
    forged = f"{head}.{body}.{'A' * len(signature)}"
    api = KubeApi(type(genuine)(genuine.server, genuine.ca, token=forged))

    with pytest.raises(KubeApiError) as refused:
        api.get(f"{namespace.path}/pods")
    assert refused.value.status == 401
    api.close()


def wait_for_status(api: KubeApi, path: str, status: int) -> None:
    """RBAC is cached by the server for a moment; the condition is awaited, never slept for."""
    from tests.cluster.process import wait_until

    def answered() -> bool:
        try:
            api.get(path)
        except KubeApiError as error:
            return error.status == status
        return status == 200

    wait_until(answered, timeout=15, what=f"{status} for {path}")


@pytest.mark.own_cluster
def test_a_proxy_in_the_environment_is_not_asked_for_loopback(
    api_tier: ApiTier, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    namespace.create_pod("worker-0")

    def label(pod: Json) -> None:
        pod["metadata"]["labels"] = {"x": "y"}

    assert api_tier._etcd_answers()
    api_tier.rewrite(
        "pods", namespace.name, "worker-0", lambda pod: pod["metadata"].update(labels={"a": "b"})
    )
    assert namespace.pod("worker-0")["metadata"]["labels"] == {"a": "b"}
    assert "worker-0" in api_tier.kubectl("get", "pods", f"--namespace={namespace.name}")
