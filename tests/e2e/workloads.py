"""What the node tier's smoke tests run: small Python programs in the project's own image."""

from __future__ import annotations

from tests.cluster.kube_api import Json, KubeApi, KubeApiError
from tests.cluster.plugin import NodeCluster
from tests.cluster.process import wait_until

# What a `restricted` namespace demands; the image's own user is numeric and not root.
RESTRICTED: Json = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
POD_SECONDS = 90.0


def python_container(cluster: NodeCluster, image: str, program: str, *arguments: str) -> Json:
    """A container named `main` that runs a Python program with the image's interpreter."""
    return {
        "name": "main",
        "image": image,
        "imagePullPolicy": cluster.image_pull_policy,
        "command": ["/opt/job-reaper/bin/python", "-c", program, *arguments],
        "securityContext": RESTRICTED,
    }


def a_python_pod(name: str, container: Json, **spec: object) -> Json:
    """A pod that ends at once when it is told to, so that tests do not wait for grace periods."""
    body = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}


def wait_for_phase(api: KubeApi, path: str, *phases: str, timeout: float = POD_SECONDS) -> Json:
    """Wait until a pod is in one of these phases; the error shows its whole status."""
    seen: Json = {}

    def reached() -> bool:
        nonlocal seen
        try:
            seen = api.get(path)
        except KubeApiError as error:
            if error.status != 404:
                raise
            return False
        return seen["status"].get("phase") in phases

    try:
        wait_until(reached, timeout=timeout, what=f"{path} to be {' or '.join(phases)}", interval=0.2)
    except Exception as error:
        error.add_note(f"last status: {seen.get('status')}")
        raise
    return seen
