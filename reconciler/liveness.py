"""Pure: what the API said about a holder's pod -> a verdict about the process. LIVENESS.md, first match wins.

Every error is UNKNOWN, never "dead". Only what the kubelet itself said ended is DEAD_CONFIRMED; what the
control plane merely lost is DEAD_INFERRED. The rows of the truth table are named by their number there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reconciler.identity import Identity
from reconciler.model import Mode, Rule, Verdict
from reconciler.podfacts import ContainerFact, Ended, PodFact, Role, State

BOOT_TOLERANCE_SEC = 1.0  # startedAt has whole seconds
TERMINATING_SLACK_SEC = 30.0
LOST_FOR_SEC = 300.0
MIN_SILENCE_SEC = 60.0


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The API did not answer the question: 401, 403, 410, 429, 5xx, time-out, TLS, DNS, nonsense."""

    code: str


@dataclass(frozen=True, slots=True)
class NotFound:
    """404 to an uncached GET. `trusted`: the self-test showed that we would see the pod if it were there."""

    trusted: bool


@dataclass(frozen=True, slots=True)
class NodeFact:
    """What is known of the pod's node, where that may be read."""

    gone: bool = False
    out_of_service: bool = False
    ready: bool | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """All there is about one holder. `silent_sec`: since its last beat in any table, by Postgres' clock."""

    answer: PodFact | NotFound | Unreadable
    node: NodeFact | None = None
    silent_sec: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict, the row of the table that gave it, and what is worth telling about the pod."""

    verdict: Verdict
    row: int
    pod: Mapping[str, Any] | None = None


def judge(
    identity: Identity, evidence: Evidence, *, own_cluster: str = "", skew_sec: float = 120.0
) -> Finding:
    """Judge one holder. Total: no input raises, and none but the rows below says dead."""
    if identity.cluster and identity.cluster != own_cluster:
        return Finding(Verdict.UNKNOWN, 1)
    match evidence.answer:
        case Unreadable():
            return Finding(Verdict.UNKNOWN, 1)
        case NotFound(trusted=trusted):
            known = trusted and not identity.namespace_assumed
            return Finding(Verdict.DEAD_INFERRED, 2) if known else Finding(Verdict.UNKNOWN, 3)
        case pod:
            verdict, row, container = _judge_pod(identity, pod, evidence, skew_sec)
    if verdict is Verdict.DEAD_CONFIRMED and identity.uid is None:
        verdict = Verdict.DEAD_INFERRED  # somebody of that name ended; nobody says it was this one
    return Finding(verdict, row, _tell(pod, container, verdict))


def rule_for(
    identity: Identity,
    finding: Finding,
    evidence: Evidence,
    *,
    heartbeat_sec: float,
    skew_sec: float,
    uncached: bool,
    other_beat_age: float | None = None,
) -> Rule:
    """What SQL may do with this holder's rows."""
    verdict, pod = finding.verdict, finding.pod
    if verdict is Verdict.DEAD_CONFIRMED and identity.canonical:
        return Rule(verdict, Mode.NOW, pod=pod)
    if verdict is Verdict.DEAD_INFERRED:
        quiet = max(MIN_SILENCE_SEC, 3 * heartbeat_sec)
        silent = evidence.silent_sec is not None and evidence.silent_sec > quiet
        if identity.canonical and uncached and silent:
            return Rule(verdict, Mode.NOW, min_silence_sec=quiet, pod=pod)
    if verdict is Verdict.ALIVE:
        born = None if identity.canonical else _youngest_age(identity, evidence.answer)
        return Rule(
            verdict,
            Mode.CAPPED,
            claimed_before_age=None if born is None else born + skew_sec,
            other_beat_age=other_beat_age if identity.canonical else None,
            pod=pod,
        )
    return Rule(verdict, Mode.EXPIRED, pod=pod)


def _judge_pod(  # noqa: PLR0911, PLR0912 - the truth table, in its order
    identity: Identity, pod: PodFact, evidence: Evidence, skew_sec: float
) -> tuple[Verdict, int, ContainerFact | None]:
    if identity.uid is not None and pod.uid != identity.uid:
        return Verdict.DEAD_INFERRED, 4, None
    ours = _ours(identity, pod)
    container = ours[0] if ours else None
    if pod.phase == "Failed" and pod.disruption == "DeletionByPodGC":
        return Verdict.DEAD_INFERRED, 5, container
    if any(_lost_status(each) for each in ours):
        return Verdict.DEAD_INFERRED, 5, container
    if pod.phase == "Succeeded":
        return Verdict.DEAD_CONFIRMED, 6, container
    if pod.phase == "Failed":
        told = bool(ours) and all(each.state is State.TERMINATED for each in ours)
        return (Verdict.DEAD_CONFIRMED if told else Verdict.DEAD_INFERRED), 6, container
    if ours and all(_has_ended(each) for each in ours):
        return Verdict.DEAD_CONFIRMED, 7, container
    restarted = _restarted(identity, ours)
    if restarted is not None:
        return (*restarted, container)
    running = [each for each in ours if each.state is State.RUNNING]
    if pod.phase == "Pending" and not any(each.role is not Role.APP for each in running):
        app = bool(ours) and all(each.role is Role.APP for each in ours)
        again = app and identity.uid is not None and not running
        return (Verdict.DEAD_CONFIRMED if again else Verdict.UNKNOWN), 10, container
    by_node = _by_node(evidence.node)
    if by_node is not None:
        return by_node, 11, container
    long_silent = evidence.silent_sec is not None and evidence.silent_sec > LOST_FOR_SEC + skew_sec
    if pod.deletion_age is not None and pod.deletion_age > TERMINATING_SLACK_SEC + skew_sec:
        lost = pod.deletion_age > LOST_FOR_SEC + skew_sec and long_silent
        return (Verdict.DEAD_INFERRED if lost else Verdict.UNKNOWN), 12, container
    if pod.phase == "Running" and pod.ready is False and pod.containers_ready and not pod.has_readiness_gates:
        lost = (pod.ready_age or 0.0) > LOST_FOR_SEC + skew_sec and long_silent
        return (Verdict.DEAD_INFERRED if lost else Verdict.UNKNOWN), 13, container
    if pod.deletion_age is not None and pod.deletion_age < 0:
        return Verdict.ALIVE, 14, container
    if any(pod.phase == "Running" or each.role is not Role.APP for each in running):
        return Verdict.ALIVE, 15, container
    return Verdict.UNKNOWN, 16, container


def _ours(identity: Identity, pod: PodFact) -> list[ContainerFact]:
    """Our container; without a name all app containers, of which every one must have ended."""
    if identity.container is not None:
        return [each for each in pod.containers if each.name == identity.container]
    return [each for each in pod.containers if each.role is Role.APP]


def _lost_status(container: ContainerFact) -> bool:
    return container.ended is not None and container.ended.reason == "ContainerStatusUnknown"


def _has_ended(container: ContainerFact) -> bool:
    if container.state is State.TERMINATED:
        return True
    return container.state is State.WAITING and container.has_run


def _restarted(identity: Identity, ours: list[ContainerFact]) -> tuple[Verdict, int] | None:
    """Rows 8 and 9: the container started after the process that wrote its name booted."""
    boot = identity.boot
    if boot is None or not ours:
        return None
    late = [
        each for each in ours if each.started_at is not None and each.started_at > boot + BOOT_TOLERANCE_SEC
    ]
    if len(late) < len(ours):
        return None
    if all(each.last_ended is not None and _spans(each.last_ended, boot) for each in late):
        return Verdict.DEAD_CONFIRMED, 8
    if all(each.restarts > 0 for each in late):
        return Verdict.DEAD_INFERRED, 8
    return Verdict.UNKNOWN, 9


def _spans(ended: Ended, boot: float) -> bool:
    if ended.started_at is None or ended.finished_at is None:
        return False
    return ended.started_at - BOOT_TOLERANCE_SEC <= boot <= ended.finished_at + BOOT_TOLERANCE_SEC


def _by_node(node: NodeFact | None) -> Verdict | None:
    if node is None:
        return None
    if node.out_of_service:
        return Verdict.DEAD_CONFIRMED
    if node.gone:
        return Verdict.DEAD_INFERRED
    return Verdict.UNKNOWN if node.ready is not True else None


def _youngest_age(identity: Identity, answer: object) -> float | None:
    """How long the pod has existed: a row claimed before that belongs to an earlier one of its name."""
    return answer.created_age if isinstance(answer, PodFact) and identity.uid is None else None


def _tell(pod: PodFact, container: ContainerFact | None, verdict: Verdict) -> Mapping[str, Any]:
    """What an on-call engineer wants to read in the event: who, where, and what ended it."""
    told: dict[str, Any] = {
        "name": pod.name,
        "namespace": pod.namespace,
        "node": pod.node,
        "phase": pod.phase,
    }
    if verdict not in (Verdict.DEAD_CONFIRMED, Verdict.DEAD_INFERRED):
        return told
    ended = container and (container.ended or container.last_ended)
    cause = pod.reason or (ended.reason if ended else "") or pod.disruption
    told["cause"] = cause or None
    if container is not None:
        told |= {"container": container.name, "restarts": container.restarts}
    if ended:
        told["exit_code"] = ended.exit_code
    return told
