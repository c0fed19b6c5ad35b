"""Every fault that later tests inject is seen here by a plain client, so that their green means something."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import urllib3

from tests.cluster.api_tier import ApiTier, answers_ready
from tests.cluster.fault_proxy import Fault, FaultProxy
from tests.cluster.kube_api import KubeApi, KubeApiError
from tests.cluster.namespace import Namespace
from tests.cluster.process import wait_until

pytestmark = pytest.mark.own_cluster
READ_PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


@pytest.fixture
def through(fault_proxy: FaultProxy, namespace: Namespace) -> Iterator[KubeApi]:
    """A reader of pods whose calls go through the proxy."""
    api = KubeApi(fault_proxy.endpoint(namespace.account(rules=READ_PODS).token()), timeout=3)
    yield api
    api.close()


def ended_by(
    proxy: FaultProxy, authority: Path, request: str, *, meanwhile: Callable[[bytes], object] = lambda _: None
) -> tuple[bytes, OSError | None]:
    """What a client reads, and the error its socket ends with; None is FIN.

    TLS by hand, because the ssl module of some Pythons tells a reset and a plain end apart no more than
    urllib3 does. `meanwhile` is called with what was read so far.
    """
    incoming, outgoing, text = ssl.MemoryBIO(), ssl.MemoryBIO(), b""
    tls = ssl.create_default_context(cafile=str(authority)).wrap_bio(
        incoming, outgoing, server_hostname="127.0.0.1"
    )
    port = urllib3.util.parse_url(proxy.server).port
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        asked = False
        while True:
            try:
                if not asked:
                    tls.do_handshake()
                    tls.write(request.encode())
                    asked = True
                while piece := tls.read(65536):
                    text += piece
            except ssl.SSLWantReadError:
                pass
            if outgoing.pending:
                raw.sendall(outgoing.read())
            meanwhile(text)
            try:
                received = raw.recv(65536)
            except ConnectionResetError as reset:
                return text, reset
            if not received:
                return text, None
            incoming.write(received)


def a_request(namespace: Namespace, query: str = "") -> str:
    token = namespace.account(rules=READ_PODS).token()
    return f"GET {namespace.path}/pods{query} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"


def test_a_proper_end_is_no_reset(fault_proxy: FaultProxy, api_tier: ApiTier, namespace: Namespace) -> None:
    text, error = ended_by(fault_proxy, api_tier.endpoint.ca, a_request(namespace))

    assert b"PodList" in text
    assert error is None


@pytest.mark.parametrize("fault", [Fault(reset=True), Fault(cut_after=20)], ids=["at once", "in the body"])
def test_a_reset_is_rst_and_not_fin(
    fault_proxy: FaultProxy, api_tier: ApiTier, namespace: Namespace, fault: Fault
) -> None:
    fault_proxy.inject(fault)

    text, error = ended_by(fault_proxy, api_tier.endpoint.ca, a_request(namespace))

    assert isinstance(error, ConnectionResetError)
    assert len(text.partition(b"\r\n\r\n")[2]) == (fault.cut_after or 0)


def test_what_hangs_is_reset_when_the_fault_is_lifted(
    fault_proxy: FaultProxy, api_tier: ApiTier, namespace: Namespace
) -> None:
    fault_proxy.inject(Fault(hang=True))
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(ended_by, fault_proxy, api_tier.endpoint.ca, a_request(namespace))
        wait_until(lambda: bool(fault_proxy.requests()), timeout=10, what="the call to hang")
        fault_proxy.clear()

        text, error = call.result(timeout=20)

    assert isinstance(error, ConnectionResetError)
    assert text == b""


def test_a_severed_watch_is_reset_and_the_proxy_lets_go_of_it(
    fault_proxy: FaultProxy, api_tier: ApiTier, namespace: Namespace
) -> None:
    namespace.create_pod("worker-0")

    text, error = ended_by(
        fault_proxy,
        api_tier.endpoint.ca,
        a_request(namespace, "?watch=true&timeoutSeconds=30"),
        meanwhile=lambda text: fault_proxy.sever() if b"ADDED" in text else None,
    )

    assert b"ADDED" in text
    assert isinstance(error, ConnectionResetError)
    wait_until(lambda: not fault_proxy.busy, timeout=5, what="the thread that waited for events to wake")


def test_without_a_fault_the_proxy_changes_nothing(through: KubeApi, namespace: Namespace) -> None:
    namespace.create_pod("worker-0")

    direct = namespace.api.get(f"{namespace.path}/pods/worker-0")

    assert through.get(f"{namespace.path}/pods/worker-0") == direct


def test_the_proxy_is_no_way_around_rbac(through: KubeApi) -> None:
    with pytest.raises(KubeApiError) as refused:
        through.get("/api/v1/secrets")
    assert refused.value.status == 403


@pytest.mark.parametrize("status", [410, 429, 500, 503])
def test_an_injected_status_is_answered_as_often_as_asked(
    fault_proxy: FaultProxy, through: KubeApi, namespace: Namespace, status: int
) -> None:
    fault_proxy.inject(Fault(match="GET .*/pods", status=status, times=2))

    for _ in range(2):
        with pytest.raises(KubeApiError) as refused:
            through.get(f"{namespace.path}/pods")
        assert refused.value.status == status
    assert through.get(f"{namespace.path}/pods")["items"] == []


def test_a_fault_hits_only_what_it_matches(
    fault_proxy: FaultProxy, through: KubeApi, namespace: Namespace
) -> None:
    namespace.create_pod("worker-0")
    fault_proxy.inject(Fault(match="pods/worker-0", status=500))

    assert len(through.get(f"{namespace.path}/pods")["items"]) == 1
    with pytest.raises(KubeApiError):
        through.get(f"{namespace.path}/pods/worker-0")


def test_too_many_requests_carries_retry_after(
    fault_proxy: FaultProxy, through: KubeApi, namespace: Namespace
) -> None:
    fault_proxy.inject(Fault(status=429, retry_after=7))
    endpoint = through.endpoint
    with urllib3.PoolManager(ca_certs=str(endpoint.ca), retries=False) as pool:
        answer = pool.request("GET", f"{endpoint.server}{namespace.path}/pods")

    assert (answer.status, answer.headers["Retry-After"]) == (429, "7")


def test_latency_delays_the_answer(fault_proxy: FaultProxy, through: KubeApi, namespace: Namespace) -> None:
    fault_proxy.inject(Fault(delay=0.7, times=1))

    began = time.monotonic()
    through.get(f"{namespace.path}/pods")

    assert time.monotonic() - began >= 0.7


def test_a_hanging_server_runs_into_the_callers_timeout(
    fault_proxy: FaultProxy, through: KubeApi, namespace: Namespace
) -> None:
    fault_proxy.inject(Fault(hang=True))

    with pytest.raises(urllib3.exceptions.TimeoutError):
        through.get(f"{namespace.path}/pods")
    fault_proxy.clear()
    assert through.get(f"{namespace.path}/pods")["items"] == []


def test_a_reset_connection_is_an_error_and_not_an_answer(
    fault_proxy: FaultProxy, through: KubeApi, namespace: Namespace
) -> None:
    fault_proxy.inject(Fault(reset=True, times=1))

    with pytest.raises(urllib3.exceptions.ProtocolError):
        through.get(f"{namespace.path}/pods")


def test_a_client_that_leaves_in_the_middle_of_its_body_costs_nothing(
    fault_proxy: FaultProxy, api_tier: ApiTier
) -> None:
    context = ssl.create_default_context(cafile=str(api_tier.endpoint.ca))
    address = ("127.0.0.1", urllib3.util.parse_url(fault_proxy.server).port)
    with (
        socket.create_connection(address, timeout=10) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as client,
    ):
        client.sendall(b"POST /api/v1/namespaces HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf")

    wait_until(
        lambda: bool(fault_proxy.served) and not fault_proxy.busy, timeout=10, what="the proxy to give it up"
    )
    assert fault_proxy.requests() == []


def test_a_list_can_be_cut_in_the_middle_of_its_body(
    fault_proxy: FaultProxy, through: KubeApi, namespace: Namespace
) -> None:
    for number in range(20):
        namespace.create_pod(f"worker-{number}")
    fault_proxy.inject(Fault(cut_after=2000, times=1))

    with pytest.raises(urllib3.exceptions.ProtocolError):
        through.get(f"{namespace.path}/pods")
    assert len(through.get(f"{namespace.path}/pods")["items"]) == 20


def test_a_watch_can_be_told_that_its_version_is_gone(
    fault_proxy: FaultProxy, through: KubeApi, namespace: Namespace
) -> None:
    fault_proxy.inject(Fault(match="watch=true", watch_error=410))

    events = list(through.watch(f"{namespace.path}/pods", seconds=2))

    assert [(event["type"], event["object"]["code"]) for event in events] == [("ERROR", 410)]


def test_open_watches_can_be_severed(fault_proxy: FaultProxy, through: KubeApi, namespace: Namespace) -> None:
    namespace.create_pod("worker-0")
    events = through.watch(f"{namespace.path}/pods", seconds=30)
    assert next(events)["type"] == "ADDED"

    fault_proxy.sever()

    with pytest.raises(urllib3.exceptions.ProtocolError):
        next(events)


def test_calls_are_counted(fault_proxy: FaultProxy, through: KubeApi, namespace: Namespace) -> None:
    for _ in range(3):
        through.get(f"{namespace.path}/pods")

    assert len(fault_proxy.requests("GET .*/pods$")) == 3


def test_a_stopped_api_server_refuses_and_keeps_its_data(api_tier: ApiTier, namespace: Namespace) -> None:
    namespace.create_pod("survivor")

    api_tier.stop_apiserver()
    try:
        assert not answers_ready(api_tier.api)
        with pytest.raises(urllib3.exceptions.HTTPError):
            namespace.pod("survivor")
    finally:
        api_tier.start_apiserver()

    assert namespace.pod("survivor")["metadata"]["name"] == "survivor"


def test_a_killed_api_server_comes_back_at_the_same_address(api_tier: ApiTier, namespace: Namespace) -> None:
    before = api_tier.endpoint.server

    api_tier.kill_apiserver()
    api_tier.start_apiserver()

    assert api_tier.endpoint.server == before
    assert namespace.api.get(namespace.path)["metadata"]["name"] == namespace.name
