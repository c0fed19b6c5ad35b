"""One test's own namespace: pods that are what the test says, accounts that may do what the test says."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from tests.cluster import pods
from tests.cluster.access import Account, create_account
from tests.cluster.kube_api import Json, KubeApi, KubeApiError
from tests.cluster.process import ClusterError, wait_until

Rewrite = Callable[[str, str, str, Callable[[Json], None]], None]


class Namespace:
    """Created on construction with a name nobody else has; `remove()` asks the cluster to delete it."""

    def __init__(
        self, api: KubeApi, *, rewrite: Rewrite | None = None, labels: dict[str, str] | None = None
    ) -> None:
        self.api = api
        self.name = f"test-{secrets.token_hex(4)}"
        self.path = f"/api/v1/namespaces/{self.name}"
        self._rewrite = rewrite
        api.create("/api/v1/namespaces", {"metadata": {"name": self.name, "labels": labels or {}}})
        # The API tier has no controller that makes it, and without it no pod is admitted.
        create_account(api, self.name, "default")

    def remove(self) -> None:
        """Delete it; a namespace that the test itself deleted is fine."""
        try:
            self.api.delete(self.path)
        except KubeApiError as error:
            if error.status not in (404, 409):
                raise

    def account(self, name: str = "job-reaper", rules: Sequence[Json] = ()) -> Account:
        """A ServiceAccount with a Role of exactly these rules (none: no Role at all)."""
        account = create_account(self.api, self.name, name)
        if rules:
            account.grant(rules)
        return account

    def create_pod(self, pod: Json | str, *, status: Json | None = None) -> Json:
        """Create a pod (a manifest, or just a name), with its status if given; returns the stored object."""
        manifest = pods.a_pod(pod) if isinstance(pod, str) else pod
        created = self.api.create(f"{self.path}/pods", manifest)
        return created if status is None else self.set_status(manifest["metadata"]["name"], **status)

    def pod(self, name: str) -> Json:
        return self.api.get(f"{self.path}/pods/{name}")

    def set_status(
        self,
        name: str,
        *,
        phase: str | None = None,
        containers: Sequence[Json] | None = None,
        init_containers: Sequence[Json] | None = None,
        conditions: Sequence[Json] | None = None,
        reason: str | None = None,
        message: str | None = None,
    ) -> Json:
        """Write what a kubelet would write; what is not given stays."""
        lists = {
            "containerStatuses": containers,
            "initContainerStatuses": init_containers,
            "conditions": conditions,
        }
        status: Json = {key: list(value) for key, value in lists.items() if value is not None}
        words = {"phase": phase, "reason": reason, "message": message}
        status.update({key: value for key, value in words.items() if value is not None})
        return self.api.merge(f"{self.path}/pods/{name}/status", {"status": status})

    def begin_deletion(self, name: str, *, grace_seconds: int = 30) -> Json:
        """Ask for deletion: the pod gets a deletionTimestamp and stays, as while it drains on a node."""
        return self.api.delete(f"{self.path}/pods/{name}", {"gracePeriodSeconds": grace_seconds})

    def delete_now(self, name: str) -> None:
        """Remove the object at once (kubectl delete --force --grace-period=0)."""
        self.api.delete(f"{self.path}/pods/{name}", {"gracePeriodSeconds": 0})
        wait_until(
            lambda: not self.api.exists(f"{self.path}/pods/{name}"), timeout=10, what=f"pod {name} to be gone"
        )

    def date_back(self, name: str, *, created: float | None = None, deletion: float | None = None) -> Json:
        """Put a pod's creation or deletion stamp so many seconds into the past; needs our own etcd."""
        if self._rewrite is None:
            raise ClusterError(
                "stamps can be rewritten only in the API tier's own etcd (mark the test own_cluster)"
            )

        def change(stored: Json) -> None:
            if created is not None:
                stored["metadata"]["creationTimestamp"] = pods.stamp(created)
            if deletion is not None:
                if "deletionTimestamp" not in stored["metadata"]:
                    raise ClusterError(f"pod {name} is not being deleted; call begin_deletion first")
                stored["metadata"]["deletionTimestamp"] = pods.stamp(deletion)

        before = self.pod(name)["metadata"]["resourceVersion"]
        self._rewrite("pods", self.name, name, change)
        # The API server learns of it by its own watch on etcd.
        wait_until(
            lambda: bool(self.pod(name)["metadata"]["resourceVersion"] != before),
            timeout=10,
            what=f"the API server to see the rewritten pod {name}",
        )
        return self.pod(name)
