"""Pure: from `locked_by` back to the pod it names. The SDK writes the canonical form (worker/identity.py).

What is not a pod (a VM, a bare name no pattern fits) is None: nobody can be asked about it, and the lease
alone decides. Fewer facts give weaker verdicts; a name is never completed by guessing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_CANONICAL = re.compile(
    r"k8s://(?P<cluster>[^/#]*)/(?P<namespace>[^/#]+)/(?P<pod>[^/#]+)/(?P<uid>[^/#]+)/(?P<container>[^/#]*)"
    r"#(?P<boot>\d{1,17})",
    re.ASCII,
)

# What Kubernetes itself accepts as a name: anything else was never a pod, and must not reach a URL.
_NAME = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_FIELDS = {
    "namespace": rf"(?P<namespace>{_NAME})",
    "pod": rf"(?P<pod>{_NAME})",
    "uid": r"(?P<uid>[A-Za-z0-9-]{1,64})",
    "container": rf"(?P<container>{_NAME})",
}
_IS_NAME = re.compile(_NAME, re.ASCII)


@dataclass(frozen=True, slots=True)
class Identity:
    """The process a `locked_by` speaks of, as far as it says."""

    namespace: str
    pod: str
    cluster: str = ""
    uid: str | None = None
    container: str | None = None
    boot_ms: int | None = None
    namespace_assumed: bool = False

    @property
    def canonical(self) -> bool:
        """Precise enough to be acted on before the lease expires."""
        return self.uid is not None and self.boot_ms is not None

    @property
    def boot(self) -> float | None:
        """The process' start, in Unix seconds by its node's clock."""
        return None if self.boot_ms is None else self.boot_ms / 1000


def parse_identity(
    locked_by: str | None, patterns: Sequence[str] = (), default_namespace: str | None = None
) -> Identity | None:
    """The pod that `locked_by` names, or None."""
    if not locked_by:
        return None
    if locked_by.startswith("k8s://"):
        return _canonical(locked_by)
    for pattern in patterns:
        match = _compiled(pattern).fullmatch(locked_by)
        if match is None:
            continue
        found = match.groupdict()
        namespace = found.get("namespace") or default_namespace
        if namespace is None:
            continue
        return Identity(
            namespace=namespace,
            pod=found["pod"],
            uid=found.get("uid"),
            container=found.get("container"),
            namespace_assumed="namespace" not in found,
        )
    return None


def _canonical(locked_by: str) -> Identity | None:
    match = _CANONICAL.fullmatch(locked_by)
    if match is None or not (_IS_NAME.fullmatch(match["namespace"]) and _IS_NAME.fullmatch(match["pod"])):
        return None
    return Identity(
        cluster=match["cluster"],
        namespace=match["namespace"],
        pod=match["pod"],
        uid=match["uid"],
        container=match["container"] or None,
        boot_ms=int(match["boot"]),
    )


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    """A configured pattern such as `{namespace}/{pod}`; what is not a field stands for itself."""
    parts = re.split(r"\{(\w+)\}", pattern)
    text = "".join(
        _FIELDS.get(part, re.escape(part)) if index % 2 else re.escape(part)
        for index, part in enumerate(parts)
    )
    return re.compile(text, re.ASCII)
