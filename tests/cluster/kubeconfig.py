"""kubeconfig files: written for our own clusters, read for the cluster somebody gives us."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kube_api import Endpoint
from tests.cluster.process import ClusterError


def write(path: Path, endpoint: Endpoint, *, namespace: str | None = None) -> Path:
    """Write a self-contained kubeconfig (certificates inline), readable by its owner only."""
    user: dict[str, str] = {}
    if endpoint.token is not None:
        user["token"] = endpoint.token
    if endpoint.client_cert is not None and endpoint.client_key is not None:
        user["client-certificate-data"] = _inline(endpoint.client_cert)
        user["client-key-data"] = _inline(endpoint.client_key)
    context: dict[str, str] = {"cluster": "job-reaper-test", "user": "job-reaper-test"}
    if namespace is not None:
        context["namespace"] = namespace
    cluster = {"server": endpoint.server, "certificate-authority-data": _inline(endpoint.ca)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "job-reaper-test", "cluster": cluster}],
        "users": [{"name": "job-reaper-test", "user": user}],
        "contexts": [{"name": "job-reaper-test", "context": context}],
        "current-context": "job-reaper-test",
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))
    return path


def read(path: Path, workspace: Path) -> Endpoint:
    """The endpoint of a kubeconfig's current context; inline data is unpacked into `workspace`.

    Exec plugins are refused with a sentence: a test cluster's kubeconfig has a certificate or a token.
    """
    if not path.is_file():
        raise ClusterError(f"no kubeconfig at {path}")
    document = yaml.safe_load(path.read_text())
    context = _named(document, "contexts", document.get("current-context"))["context"]
    cluster = _named(document, "clusters", context["cluster"])["cluster"]
    user = _named(document, "users", context["user"])["user"]
    ca = _file(cluster, "certificate-authority", path, workspace)
    if ca is None:
        raise ClusterError(
            f"{path}: the cluster has no certificate-authority; a test never skips TLS verification"
        )
    cert = _file(user, "client-certificate", path, workspace)
    key = _file(user, "client-key", path, workspace)
    token = user.get("token")
    if cert is None and token is None:
        raise ClusterError(
            f"{path}: the user has neither a client certificate nor a token (exec plugins: make one)"
        )
    return Endpoint(cluster["server"].rstrip("/"), ca, cert, key, token)


def _named(document: dict[str, Any], kind: str, name: Any) -> dict[str, Any]:
    for entry in document.get(kind) or []:
        if entry["name"] == name:
            return dict(entry)
    raise ClusterError(f"the kubeconfig has no {kind} entry named {name!r}")


def _file(section: dict[str, Any], key: str, source: Path, workspace: Path) -> Path | None:
    if f"{key}-data" in section:
        target = workspace / f"given-{key}.pem"
        target.touch(mode=0o600)
        target.write_bytes(base64.b64decode(section[f"{key}-data"]))
        return target
    if key in section:
        return (source.parent / str(section[key])).resolve()
    return None


def _inline(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
