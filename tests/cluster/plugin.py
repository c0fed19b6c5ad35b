"""The pytest side: options, and one fixture per tier.

A tier that cannot run says why; with CI=true that is a failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import pytest

from tests.ci import cannot_run

if TYPE_CHECKING:
    # Every pytest run loads this module, also that of the pure tests: the rest is imported by the fixtures
    # that use it.
    from tests.cluster.api_tier import ApiTier
    from tests.cluster.elsewhere import GivenCluster
    from tests.cluster.fault_proxy import FaultProxy
    from tests.cluster.kube_api import Endpoint, KubeApi
    from tests.cluster.namespace import Namespace
    from tests.cluster.node_tier import NodeTier


PROGRAMS = pytest.StashKey[Mapping[str, Path]]()
MISSING = pytest.StashKey[str]()


class Cluster(Protocol):
    """What every cluster offers, ours or not: tests that use only this run everywhere."""

    kubeconfig: Path

    @property
    def api(self) -> KubeApi: ...

    @property
    def endpoint(self) -> Endpoint: ...

    def kubectl(self, *arguments: str, timeout: float = 60.0) -> str: ...


class NodeCluster(Cluster, Protocol):
    """A cluster whose pods are processes."""

    image_pull_policy: str

    def product_image(self) -> str: ...

    def expose(self, host_port: int, *, name: str) -> tuple[str, int]: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cluster", "the Kubernetes of the tests")
    group.addoption(
        "--kubeconfig", type=Path, help="run on the cluster of this kubeconfig instead of our own"
    )
    group.addoption(
        "--cluster", choices=["own", "kind"], default="own", help="own (default) or kind (needs Docker)"
    )
    group.addoption(
        "--kube-assets", type=Path, help="directory with kube-apiserver, etcd, ... to use as they are"
    )
    group.addoption("--image", help="with --kubeconfig: the project's image, where that cluster can pull it")
    group.addoption(
        "--host-address", help="with --kubeconfig: an address of this machine that its pods can reach"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "own_cluster: hurts or rewrites the cluster; deselected on one that is not ours",
    )
    config.addinivalue_line("markers", "long: minutes; run by make e2e-long only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what nobody may do to somebody else's cluster; pytest counts them."""
    if not _elsewhere(config):
        return
    ours = [item for item in items if item.get_closest_marker("own_cluster")]
    if ours:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Get the programs before the first test: a build of minutes must not run into a test's time limit."""
    config = session.config
    asked = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if config.option.collectonly or _elsewhere(config) or not asked & {"api_cluster", "node_cluster"}:
        return
    from tests.cluster import assets, preflight
    from tests.cluster.process import ClusterError

    whole_node = "node_cluster" in asked and not preflight.node_tier_lacks()
    wanted = assets.ALL_PROGRAMS if whole_node else assets.API_PROGRAMS
    if not whole_node and "api_cluster" not in asked:
        return
    with _speaking(config):
        try:
            config.stash[PROGRAMS] = assets.locate(wanted, given=config.getoption("--kube-assets"))
        except ClusterError as reason:
            config.stash[MISSING] = str(reason)


@pytest.fixture(scope="session")
def api_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """The API tier: one server per pytest process (one per xdist worker), started when first asked for."""
    from tests.cluster.api_tier import ApiTier
    from tests.cluster.assets import say

    if _elsewhere(request.config):
        yield request.getfixturevalue("foreign_cluster")
        return
    programs = _programs("API tier", request.config)
    with _speaking(request.config):
        tier = ApiTier(tmp_path_factory.mktemp("api-tier"), programs)
        tier.start()
        say(f"API tier ready after {tier.started_in:.1f} s")
    yield tier
    tier.stop()


@pytest.fixture
def api_tier(api_cluster: Cluster) -> ApiTier:
    """The API tier where it is ours, for tests that stop it or rewrite its etcd; mark those own_cluster."""
    from tests.cluster.api_tier import ApiTier

    assert isinstance(api_cluster, ApiTier), "mark this test own_cluster"
    return api_cluster


@pytest.fixture
def namespace(api_cluster: Cluster) -> Iterator[Namespace]:
    """A namespace of the API tier for this test alone."""
    from tests.cluster.api_tier import ApiTier
    from tests.cluster.namespace import Namespace

    rewrite = api_cluster.rewrite if isinstance(api_cluster, ApiTier) else None
    made = Namespace(api_cluster.api, rewrite=rewrite)
    yield made
    made.remove()


@pytest.fixture
def fault_proxy(api_tier: ApiTier) -> Iterator[FaultProxy]:
    """A proxy in front of the API server that can be told to misbehave; mark its tests own_cluster."""
    from tests.cluster.fault_proxy import FaultProxy

    with FaultProxy(api_tier.endpoint, api_tier.pki.authority) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def node_cluster(request: pytest.FixtureRequest) -> Iterator[NodeCluster]:
    """The node tier: a whole node, with the project's image built from its Dockerfile."""
    from tests.cluster import images, preflight
    from tests.cluster.node_tier import NodeTier

    if _elsewhere(request.config):
        yield request.getfixturevalue("foreign_cluster")
        return
    reasons = preflight.node_tier_lacks()
    if reasons:
        unavailable("node tier", "; ".join(reasons))
    programs = _programs("node tier", request.config)
    with _speaking(request.config):
        tier = NodeTier(programs, images.pause_image())
        tier.start()
    try:
        yield tier
    finally:
        tier.stop()


@pytest.fixture
def node_tier(node_cluster: NodeCluster) -> NodeTier:
    """The node tier where it is ours, for tests that hurt it; mark those own_cluster."""
    from tests.cluster.node_tier import NodeTier

    assert isinstance(node_cluster, NodeTier), "mark this test own_cluster"
    return node_cluster


@pytest.fixture(scope="session")
def product_image(request: pytest.FixtureRequest, node_cluster: NodeCluster) -> str:
    """The reference of the project's image, built from the real Dockerfile and present on the node."""
    with _speaking(request.config):
        return node_cluster.product_image()


@pytest.fixture
def node_namespace(node_cluster: NodeCluster) -> Iterator[Namespace]:
    """A namespace of the node tier for this test alone."""
    from tests.cluster.namespace import Namespace

    made = Namespace(node_cluster.api)
    yield made
    made.remove()


@pytest.fixture(scope="session")
def foreign_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GivenCluster]:
    """The cluster of --kubeconfig or --cluster=kind."""
    from tests.cluster.elsewhere import GivenCluster, KindCluster, kind_lacks

    workspace = tmp_path_factory.mktemp("foreign-cluster")
    option = request.config.getoption
    if option("--kubeconfig"):
        cluster: GivenCluster = GivenCluster(
            option("--kubeconfig"), workspace, image=option("--image"), host_address=option("--host-address")
        )
    else:
        lacks = kind_lacks()
        if lacks:
            unavailable("kind", "; ".join(lacks))
        with _speaking(request.config):
            cluster = KindCluster(workspace)
    yield cluster
    cluster.stop()


def unavailable(tier: str, reason: str) -> NoReturn:
    """Skip with the reason, or fail with it where a skip would hide that nothing was tested."""
    cannot_run(f"{tier} cannot run here: {reason}")


def _programs(tier: str, config: pytest.Config) -> Mapping[str, Path]:
    """What pytest_collection_finish got; or the reason why it got nothing, as a skip or a failure."""
    missing = config.stash.get(MISSING, None)
    if missing is not None:
        unavailable(tier, missing)
    return config.stash[PROGRAMS]


def _elsewhere(config: pytest.Config) -> bool:
    return bool(config.getoption("--kubeconfig")) or config.getoption("--cluster") == "kind"


@contextlib.contextmanager
def _speaking(config: pytest.Config) -> Iterator[None]:
    """Let progress through pytest's capture: a build of minutes must not look like a hang."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        yield
