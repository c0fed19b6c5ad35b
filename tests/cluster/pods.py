"""Pods as plain values: factories with defaults for what a test wants to say, and nothing else."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from tests.cluster.kube_api import Json

# On a node that does not exist nothing runs, and a deletion waits for a kubelet, as it would on a real node.
NO_SUCH_NODE = "node-a"


def a_pod(
    name: str,
    *,
    node: str | None = NO_SUCH_NODE,
    containers: Sequence[str] = ("worker",),
    labels: Mapping[str, str] | None = None,
    image: str = "job-reaper.test/worker:none",
    **spec: Any,
) -> Json:
    """A pod manifest; further keywords go into the spec as they are."""
    body: Json = {
        "containers": [{"name": container, "image": image} for container in containers],
        # Nobody's scheduler: on a given cluster too the pod stays an object.
        "schedulerName": "job-reaper-tests",
        **spec,
    }
    if node is not None:
        body["nodeName"] = node
    metadata: Json = {"name": name, "labels": dict(labels or {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def stamp(seconds_ago: float = 0.0) -> str:
    """A Kubernetes time that many seconds ago (negative: ahead)."""
    moment = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds_ago)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def running(
    name: str = "worker",
    *,
    since: float = 60.0,
    restarts: int = 0,
    last: Json | None = None,
    ready: bool = True,
) -> Json:
    """A containerStatus: runs since so many seconds."""
    return _status(name, {"running": {"startedAt": stamp(since)}}, restarts, last, ready)


def terminated(
    name: str = "worker",
    *,
    exit_code: int = 0,
    reason: str = "Completed",
    ran_for: float = 60.0,
    ended: float = 1.0,
    restarts: int = 0,
    last: Json | None = None,
) -> Json:
    """A containerStatus: ended so many seconds ago."""
    state = termination(exit_code=exit_code, reason=reason, ran_for=ran_for, ended=ended)
    return _status(name, state, restarts, last, ready=False)


def waiting(
    name: str = "worker", *, reason: str = "CrashLoopBackOff", restarts: int = 0, last: Json | None = None
) -> Json:
    """A containerStatus: waits; with `last` it has run before."""
    return _status(name, {"waiting": {"reason": reason}}, restarts, last, ready=False)


def termination(*, exit_code: int, reason: str, ran_for: float = 60.0, ended: float = 1.0) -> Json:
    """A terminated state, for `last` or as the state itself."""
    return {
        "terminated": {
            "exitCode": exit_code,
            "reason": reason,
            "startedAt": stamp(ended + ran_for),
            "finishedAt": stamp(ended),
        }
    }


def condition(kind: str, status: bool, *, reason: str | None = None) -> Json:
    """A pod condition that changed just now."""
    value = {"type": kind, "status": "True" if status else "False", "lastTransitionTime": stamp()}
    return value if reason is None else {**value, "reason": reason}


def _status(name: str, state: Json, restarts: int, last: Json | None, ready: bool) -> Json:
    image = "job-reaper.test/worker:none"
    return {
        "name": name,
        "image": image,
        "imageID": image,
        "ready": ready,
        "restartCount": restarts,
        "state": state,
        "lastState": last or {},
    }
