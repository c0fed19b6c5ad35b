"""The truth table of LIVENESS.md: one test per row, and what must hold for everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.identity import Identity
from reconciler.liveness import Evidence, Finding, NodeFact, NotFound, Unreadable, judge, rule_for
from reconciler.model import Mode, Verdict
from reconciler.podfacts import ContainerFact, Ended, PodFact, Role, State, reduce_pod

BOOT = 1_000_000.0
OURS = Identity("video", "clip-0", uid="u-1", container="worker", boot_ms=int(BOOT * 1000))
NAMED = Identity("video", "clip-0")
DEAD, GUESS, ALIVE, UNKNOWN = (
    Verdict.DEAD_CONFIRMED,
    Verdict.DEAD_INFERRED,
    Verdict.ALIVE,
    Verdict.UNKNOWN,
)


def a_container(**changes: Any) -> ContainerFact:
    return replace(ContainerFact("worker", Role.APP, State.RUNNING, started_at=BOOT - 2), **changes)


def a_pod(*containers: ContainerFact, **changes: Any) -> PodFact:
    healthy = PodFact(
        "video",
        "clip-0",
        "u-1",
        phase="Running",
        created_age=600,
        ready=True,
        containers_ready=True,
        node="n1",
    )
    return replace(healthy, containers=containers or (a_container(),), **changes)


def ended(reason: str = "Error", code: int = 1, start: float = BOOT - 2, end: float = BOOT + 60) -> Ended:
    return Ended(reason, code, start, end)


def terminated(reason: str = "Error", code: int = 1) -> ContainerFact:
    return a_container(state=State.TERMINATED, ended=ended(reason, code), started_at=None)


LOST = 300 + 120 + 1
TABLE = [
    (1, UNKNOWN, "an API error is no evidence", Unreadable("403"), {}),
    (2, GUESS, "a trusted 404 to an uncached GET", NotFound(trusted=True), {}),
    (3, UNKNOWN, "a 404 without the self-test", NotFound(trusted=False), {}),
    (4, GUESS, "the same name, another uid", a_pod(uid="u-2"), {}),
    (
        5,
        GUESS,
        "failed by the pod garbage collector",
        a_pod(terminated(), phase="Failed", disruption="DeletionByPodGC"),
        {},
    ),
    (5, GUESS, "a container status that was made up", a_pod(terminated("ContainerStatusUnknown", 137)), {}),
    (6, DEAD, "succeeded", a_pod(terminated("Completed", 0), phase="Succeeded"), {}),
    (6, DEAD, "failed, our container out of memory", a_pod(terminated("OOMKilled", 137), phase="Failed"), {}),
    (6, GUESS, "failed, our container not said to have ended", a_pod(phase="Failed"), {}),
    (7, DEAD, "our container terminated in a running pod", a_pod(terminated()), {}),
    (
        7,
        DEAD,
        "crash loop",
        a_pod(
            a_container(state=State.WAITING, waiting_reason="CrashLoopBackOff", started_at=None, restarts=3)
        ),
        {},
    ),
    (
        8,
        DEAD,
        "restarted, and the last process spans our boot",
        a_pod(a_container(started_at=BOOT + 70, restarts=1, last_ended=ended())),
        {},
    ),
    (
        8,
        GUESS,
        "restarted, the last process is another",
        a_pod(
            a_container(started_at=BOOT + 70, restarts=2, last_ended=ended(start=BOOT + 30, end=BOOT + 60))
        ),
        {},
    ),
    (
        9,
        UNKNOWN,
        "started after our boot, yet never restarted: a clock step",
        a_pod(a_container(started_at=BOOT + 70)),
        {},
    ),
    (
        10,
        DEAD,
        "pending again: the sandbox was rebuilt",
        a_pod(a_container(state=State.WAITING, started_at=None), phase="Pending"),
        {},
    ),
    (
        10,
        UNKNOWN,
        "pending, nothing said of our container",
        replace(a_pod(phase="Pending"), containers=()),
        {},
    ),
    (11, DEAD, "the node is out of service", a_pod(), {"node": NodeFact(out_of_service=True)}),
    (11, GUESS, "the node object is gone", a_pod(), {"node": NodeFact(gone=True)}),
    (11, UNKNOWN, "the node is not ready", a_pod(), {"node": NodeFact(ready=False)}),
    (12, UNKNOWN, "terminating for too long", a_pod(deletion_age=151), {"silent_sec": LOST}),
    (
        12,
        GUESS,
        "terminating for minutes, and silent as long",
        a_pod(deletion_age=LOST),
        {"silent_sec": LOST},
    ),
    (12, UNKNOWN, "terminating for minutes, but it beats", a_pod(deletion_age=LOST), {"silent_sec": 5}),
    (13, UNKNOWN, "the lost-node fingerprint", a_pod(ready=False, ready_age=60), {"silent_sec": LOST}),
    (
        13,
        GUESS,
        "the fingerprint for minutes, and silent as long",
        a_pod(ready=False, ready_age=LOST),
        {"silent_sec": LOST},
    ),
    (14, ALIVE, "draining", a_pod(deletion_age=-20), {}),
    (15, ALIVE, "running since before our boot", a_pod(), {}),
    (15, ALIVE, "its own readiness probe fails", a_pod(ready=False, containers_ready=False), {}),
    (
        15,
        ALIVE,
        "a sidecar runs while the pod is pending",
        a_pod(a_container(role=Role.SIDECAR), phase="Pending"),
        {},
    ),
    (16, UNKNOWN, "our container is not in the list", a_pod(a_container(name="other")), {}),
    (16, UNKNOWN, "phase Unknown", a_pod(phase="Unknown"), {}),
]


@pytest.mark.parametrize(
    ("row", "verdict", "answer", "rest"),
    [(row, verdict, answer, rest) for row, verdict, _, answer, rest in TABLE],
    ids=[f"row {row}: {text}" for row, _, text, _, _ in TABLE],
)
def test_the_truth_table(row: int, verdict: Verdict, answer: Any, rest: dict[str, Any]) -> None:
    finding = judge(OURS, Evidence(answer, **rest))
    assert (finding.verdict, finding.row) == (verdict, row)


def test_a_404_in_an_assumed_namespace_proves_nothing() -> None:
    assumed = replace(NAMED, namespace_assumed=True)
    assert judge(assumed, Evidence(NotFound(trusted=True))) == Finding(UNKNOWN, 3)


def test_another_clusters_holder_is_unknown_whatever_the_answer() -> None:
    assert (
        judge(replace(OURS, cluster="eu"), Evidence(NotFound(trusted=True)), own_cluster="us").verdict
        is UNKNOWN
    )


def test_death_is_not_confirmed_for_a_name_without_a_uid() -> None:
    assert judge(NAMED, Evidence(a_pod(terminated()))).verdict is GUESS


def test_without_a_container_name_all_app_containers_must_have_ended() -> None:
    anonymous = replace(OURS, container=None)
    half = a_pod(terminated(), a_container(name="other"))
    assert judge(anonymous, Evidence(half)).verdict is ALIVE
    both = a_pod(terminated(), replace(terminated(), name="other"))
    assert judge(anonymous, Evidence(both)).verdict is DEAD


def test_the_cause_travels_with_a_confirmed_death() -> None:
    finding = judge(OURS, Evidence(a_pod(terminated("OOMKilled", 137), phase="Failed")))
    assert finding.pod == {
        "name": "clip-0",
        "namespace": "video",
        "node": "n1",
        "phase": "Failed",
        "cause": "OOMKilled",
        "container": "worker",
        "restarts": 0,
        "exit_code": 137,
    }


def _rule(identity: Identity, verdict: Verdict, *, silent: float | None = None, uncached: bool = True) -> Any:
    evidence = Evidence(a_pod(), silent_sec=silent)
    return rule_for(
        identity,
        Finding(verdict, 0),
        evidence,
        heartbeat_sec=15,
        skew_sec=120,
        uncached=uncached,
        other_beat_age=3.0,
    )


@pytest.mark.parametrize(
    ("identity", "verdict", "silent", "uncached", "mode"),
    [
        (OURS, DEAD, None, False, Mode.NOW),
        (NAMED, DEAD, None, True, Mode.EXPIRED),
        (OURS, GUESS, 61, True, Mode.NOW),
        (OURS, GUESS, 61, False, Mode.EXPIRED),
        (OURS, GUESS, 59, True, Mode.EXPIRED),
        (OURS, GUESS, None, True, Mode.EXPIRED),
        (NAMED, GUESS, 999, True, Mode.EXPIRED),
        (OURS, ALIVE, None, True, Mode.CAPPED),
        (OURS, UNKNOWN, 999, True, Mode.EXPIRED),
    ],
)
def test_only_a_canonical_identity_may_be_acted_on_early(
    identity: Identity, verdict: Verdict, silent: float | None, uncached: bool, mode: Mode
) -> None:
    assert _rule(identity, verdict, silent=silent, uncached=uncached).mode is mode


def test_a_fresh_beat_in_the_row_itself_refutes_an_inferred_death() -> None:
    assert _rule(OURS, GUESS, silent=61).min_silence_sec == 60


def test_rows_claimed_before_the_pod_was_born_belong_to_another_of_its_name() -> None:
    assert _rule(NAMED, ALIVE).claimed_before_age == 720
    assert _rule(OURS, ALIVE).claimed_before_age is None
    assert _rule(OURS, ALIVE).other_beat_age == 3.0
    assert _rule(NAMED, ALIVE).other_beat_age is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
STATUS = st.fixed_dictionaries(
    {"name": st.just("worker") | JSON},
    optional=dict.fromkeys(("state", "lastState", "restartCount"), JSON),
)
PODS = st.fixed_dictionaries(
    {"metadata": st.just({"name": "clip-0", "namespace": "video", "uid": "u-1"}) | JSON},
    optional={
        "spec": JSON,
        "status": JSON
        | st.fixed_dictionaries(
            {},
            optional={
                "phase": st.sampled_from(["Pending", "Running", "Unknown", ""]) | JSON,
                "conditions": st.lists(JSON, max_size=2),
                "containerStatuses": st.lists(STATUS, max_size=2) | JSON,
            },
        ),
    },
)


@given(PODS | JSON, st.none() | st.floats(0, 1e6))
def test_no_answer_raises_and_nonsense_is_never_a_confirmed_death(raw: Any, silent: float | None) -> None:
    pod = reduce_pod(raw, BOOT)
    if pod is None:
        return
    finding = judge(OURS, Evidence(pod, silent_sec=silent))
    if finding.verdict is DEAD:
        said = [each for each in pod.containers if each.name == "worker"]
        assert pod.phase == "Succeeded" or (said and all(each.state is not State.RUNNING for each in said))


@given(st.sampled_from([OURS, NAMED]), st.text(), st.none() | st.floats(0, 1e9))
def test_an_error_is_never_dead(identity: Identity, code: str, silent: float | None) -> None:
    assert judge(identity, Evidence(Unreadable(code), silent_sec=silent)).verdict is UNKNOWN
