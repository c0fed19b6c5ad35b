"""Identities with exactly the rights a test gives them: account, Role, RoleBinding, token, kubeconfig."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import kubeconfig
from tests.cluster.kube_api import Endpoint, Json, KubeApi, KubeApiError

RBAC = "/apis/rbac.authorization.k8s.io/v1"
TOKEN_SECONDS = 3600


@dataclass(frozen=True)
class Account:
    """A ServiceAccount in a namespace, seen by the administrator's API."""

    api: KubeApi
    namespace: str
    name: str

    def token(self, *, seconds: int = TOKEN_SECONDS) -> str:
        """A fresh token, issued and signed by the API server itself."""
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{self.name}/token"
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        return str(self.api.create(path, body)["status"]["token"])

    def endpoint(self, *, server: str | None = None) -> Endpoint:
        """How to call the API as this account, directly or through a proxy's address."""
        direct = self.api.endpoint
        return Endpoint(server or direct.server, direct.ca, token=self.token())

    def kubeconfig(self, path: Path, *, server: str | None = None) -> Path:
        """A kubeconfig for a program that shall act as this account."""
        return kubeconfig.write(path, self.endpoint(server=server), namespace=self.namespace)

    def grant(
        self, rules: Sequence[Json], *, in_namespace: str | None = None, role: str | None = None
    ) -> None:
        """Give it a Role with these rules and the RoleBinding to it (in its own namespace, or another)."""
        where = in_namespace or self.namespace
        name = role or self.name
        meta = {"name": name}
        self.api.create(f"{RBAC}/namespaces/{where}/roles", {"metadata": meta, "rules": list(rules)})
        self.bind(in_namespace=where, role=name)

    def bind(self, *, in_namespace: str | None = None, role: str | None = None) -> None:
        """Create the RoleBinding (again): the end of a drop()."""
        where = in_namespace or self.namespace
        name = role or self.name
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": self.name, "namespace": self.namespace}],
        }
        self.api.create(f"{RBAC}/namespaces/{where}/rolebindings", binding)

    def drop(self, *, in_namespace: str | None = None, role: str | None = None) -> None:
        """Delete the RoleBinding: from now on the API answers 403."""
        where = in_namespace or self.namespace
        self.api.delete(f"{RBAC}/namespaces/{where}/rolebindings/{role or self.name}")


def create_account(api: KubeApi, namespace: str, name: str) -> Account:
    """Make a ServiceAccount without any rights; one that is there already is taken."""
    try:
        api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
    except KubeApiError as error:
        if error.status != 409:
            raise
    return Account(api, namespace, name)
