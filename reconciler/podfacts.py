"""Pure: a pod as the API tells it, reduced to what the verdict needs.

A whole pod is some 45 kB of Python objects; ten thousand of them do not fit where this does. Nothing here
raises: a field that is missing or odd is absent, and an absent field never reads as death.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """What a container is in its pod."""

    APP = "app"
    INIT = "init"
    SIDECAR = "sidecar"  # an init container that restarts always: it runs beside the app


class State(StrEnum):
    """What the kubelet last said of a container."""

    RUNNING = "running"
    WAITING = "waiting"
    TERMINATED = "terminated"
    UNSAID = "unsaid"


@dataclass(frozen=True, slots=True)
class Ended:
    """A process the kubelet saw end. Times are Unix seconds by the node's clock."""

    reason: str = ""
    exit_code: int | None = None
    started_at: float | None = None
    finished_at: float | None = None


@dataclass(frozen=True, slots=True)
class ContainerFact:
    """One container's status."""

    name: str
    role: Role = Role.APP
    state: State = State.UNSAID
    waiting_reason: str = ""
    started_at: float | None = None
    restarts: int = 0
    ended: Ended | None = None  # the current state, when terminated
    last_ended: Ended | None = None  # the process before this one

    @property
    def has_run(self) -> bool:
        return self.restarts > 0 or self.last_ended is not None


@dataclass(frozen=True, slots=True)
class PodFact:
    """One pod. Ages are seconds before the API server's own Date; negative lies ahead."""

    namespace: str
    name: str
    uid: str
    phase: str = ""
    reason: str = ""
    node: str = ""
    created_age: float | None = None
    deletion_age: float | None = None
    containers: tuple[ContainerFact, ...] = ()
    ready: bool | None = None
    ready_age: float | None = None
    containers_ready: bool | None = None
    disruption: str = ""
    has_readiness_gates: bool = False


def reduce_pod(raw: object, now: float) -> PodFact | None:
    """The facts of one pod object, or None where it is not one. `now` comes from the API's Date header."""
    pod = _map(raw)
    meta, spec, status = _map(pod.get("metadata")), _map(pod.get("spec")), _map(pod.get("status"))
    name, namespace, uid = _text(meta.get("name")), _text(meta.get("namespace")), _text(meta.get("uid"))
    if not (name and namespace and uid):
        return None
    conditions = {_text(entry.get("type")): entry for entry in _maps(status.get("conditions"))}
    ready, complete = conditions.get("Ready", {}), conditions.get("ContainersReady", {})
    disruption = conditions.get("DisruptionTarget", {})
    return PodFact(
        namespace=namespace,
        name=name,
        uid=uid,
        phase=_text(status.get("phase")),
        reason=_text(status.get("reason")),
        node=_text(spec.get("nodeName")),
        created_age=_age(meta.get("creationTimestamp"), now),
        deletion_age=_age(meta.get("deletionTimestamp"), now),
        containers=_containers(spec, status),
        ready=_truth(ready.get("status")),
        ready_age=_age(ready.get("lastTransitionTime"), now),
        containers_ready=_truth(complete.get("status")),
        disruption=_text(disruption.get("reason")) if _truth(disruption.get("status")) else "",
        has_readiness_gates=bool(spec.get("readinessGates")),
    )


def _containers(spec: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[ContainerFact, ...]:
    sidecars = {
        _text(entry.get("name"))
        for entry in _maps(spec.get("initContainers"))
        if entry.get("restartPolicy") == "Always"
    }
    facts = [_container(entry, Role.APP) for entry in _maps(status.get("containerStatuses"))]
    for entry in _maps(status.get("initContainerStatuses")):
        sidecar = _text(entry.get("name")) in sidecars
        facts.append(_container(entry, Role.SIDECAR if sidecar else Role.INIT))
    return tuple(facts)


def _container(raw: Mapping[str, Any], role: Role) -> ContainerFact:
    state, last = _map(raw.get("state")), _map(raw.get("lastState"))
    word = next((kind for kind in State if isinstance(state.get(kind), Mapping)), State.UNSAID)
    current = _map(state.get(word))
    restarts = raw.get("restartCount")
    return ContainerFact(
        name=_text(raw.get("name")),
        role=role,
        state=word,
        waiting_reason=_text(current.get("reason")) if word is State.WAITING else "",
        started_at=_instant(current.get("startedAt")),
        restarts=restarts if isinstance(restarts, int) and not isinstance(restarts, bool) else 0,
        ended=_ended(current) if word is State.TERMINATED else None,
        last_ended=_ended(_map(last["terminated"])) if isinstance(last.get("terminated"), Mapping) else None,
    )


def _ended(raw: Mapping[str, Any]) -> Ended:
    code = raw.get("exitCode")
    return Ended(
        reason=_text(raw.get("reason")),
        exit_code=code if isinstance(code, int) and not isinstance(code, bool) else None,
        started_at=_instant(raw.get("startedAt")),
        finished_at=_instant(raw.get("finishedAt")),
    )


def _instant(value: object) -> float | None:
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
        return moment.timestamp() if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def _age(value: object, now: float) -> float | None:
    instant = _instant(value)
    return None if instant is None else now - instant


def _truth(value: object) -> bool | None:
    return {"True": True, "False": False}.get(value) if isinstance(value, str) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: object) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
