"""From locked_by back to the pod: exactly, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.identity import Identity, parse_identity
from reconciler.worker.identity import worker_identity

LEGACY = ("{namespace}/{pod}", "{pod}")
CANONICAL = "k8s://prod/video/clip-7d9-x/0f1c-uid/worker#1763452800123"


def test_the_canonical_form_tells_everything() -> None:
    assert parse_identity(CANONICAL) == Identity(
        cluster="prod",
        namespace="video",
        pod="clip-7d9-x",
        uid="0f1c-uid",
        container="worker",
        boot_ms=1763452800123,
    )


def test_what_the_sdk_writes_is_read_back() -> None:
    env = {"POD_NAMESPACE": "video", "POD_NAME": "clip-0", "POD_UID": "u-1", "CONTAINER_NAME": "worker"}
    found = parse_identity(worker_identity(env, boot_unix_ms=1000))
    assert found == Identity("video", "clip-0", uid="u-1", container="worker", boot_ms=1000)
    assert found.canonical
    assert found.boot == 1.0


@pytest.mark.parametrize(
    ("locked_by", "expected"),
    [
        ("video/clip-0", Identity("video", "clip-0")),
        ("clip-0", Identity("jobs", "clip-0", namespace_assumed=True)),
        ("clip-0.web", Identity("jobs", "clip-0.web", namespace_assumed=True)),
    ],
)
def test_older_forms_tell_less(locked_by: str, expected: Identity) -> None:
    found = parse_identity(locked_by, LEGACY, "jobs")
    assert found == expected
    assert not expected.canonical


@pytest.mark.parametrize(
    "locked_by",
    [
        None,
        "",
        "host://vm-1/4711#1",
        "Worker 1",
        "a/b/c",
        "k8s://prod/video/clip/uid/worker",  # no boot stamp
        "k8s://prod/video//uid/worker#1",
        "k8s://prod/video/../uid/worker#1",
        "k8s://prod/Video/clip/uid/worker#1",
        "k8s://prod/video/clip/uid/worker#12x",
        "../secrets",
        "video/clip?x=1",
        "clip\n",
    ],
)
def test_what_is_not_a_pod_names_nobody(locked_by: str | None) -> None:
    assert parse_identity(locked_by, LEGACY, "jobs") is None


def test_a_bare_name_needs_a_namespace_to_be_looked_up() -> None:
    assert parse_identity("clip-0", LEGACY, None) is None


def test_signs_of_a_pattern_stand_for_themselves() -> None:
    assert parse_identity("w[video]clip-0", ("w[{namespace}]{pod}",)) == Identity("video", "clip-0")
    assert parse_identity("wvclip-0", ("w[{namespace}]{pod}",)) is None


@given(st.text())
def test_no_text_raises_and_none_gives_a_name_that_kubernetes_would_refuse(text: str) -> None:
    found = parse_identity(text, LEGACY, "jobs")
    if found is not None:
        assert not set(found.pod) & set("/?#% \n")
        assert found.pod == found.pod.lower()
