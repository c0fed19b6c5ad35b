"""The variables: which one means which key, and which ones nobody reads.

A variable that is set to nothing counts as not set: manifests render empty strings where a value is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType

from reconciler.config.given import ENV, FALLBACK, Given, did_you_mean
from reconciler.config.setting import Path, walk
from reconciler.config.settings import Settings

CONFIG = "REAPER_CONFIG"
TABLES = "REAPER_TABLES"
_FACTOR = "_SLA_FACTOR"
# What Kubernetes injects for each Service of the namespace (enableServiceLinks), here for reaper*.
_LINK_NAME = r"REAPER_(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.*)?|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_\w+)?)"
_LINK_VALUE = r"(?:tcp|udp|sctp)://\S+"


@cache
def variables() -> Mapping[str, tuple[Path, int]]:
    """Every variable with a fixed name: its key and its rank."""
    found: dict[str, tuple[Path, int]] = {}
    for path, _, setting in walk(Settings):
        for rank, names in ((ENV, setting.env), (FALLBACK, setting.fallback)):
            for position, name in enumerate(names):
                found[name] = (path, rank - position)
    return MappingProxyType(found)


def factor_variable(stage: str) -> str:
    """`burn-in` is tuned by BURN_IN_SLA_FACTOR."""
    return re.sub(r"[^A-Z0-9]", "_", stage.upper()) + _FACTOR


def read(env: Mapping[str, str], stages: Iterable[str], warnings: list[str]) -> list[Given]:
    """All values the environment gives. What is odd but harmless is added to `warnings`."""
    given: list[Given] = []
    named = variables()
    for name, (path, rank) in named.items():
        value = env.get(name, "").strip()
        if not value:
            continue
        if _is_service_link(name, value):
            warnings.append(
                f"{name} is ignored: Kubernetes set it for a Service of that name. "
                "Set enableServiceLinks: false in the pod, or rename the Service"
            )
            continue
        given.append(Given(path, value, rank, f"env {name}", f"env {name}"))
    by_variable: dict[str, list[str]] = {}
    for stage in stages:
        by_variable.setdefault(factor_variable(stage), []).append(stage)
    for name, names in by_variable.items():
        if value := env.get(name, "").strip():
            given.extend(
                Given(("stages", stage, "factor"), value, ENV, f"env {name}", f"env {name}")
                for stage in names
            )
    warnings.extend(_unread(env, {*named, CONFIG, TABLES}, by_variable.keys()))
    return given


def _is_service_link(name: str, value: str) -> bool:
    if re.fullmatch(_LINK_NAME, name):
        return True
    # A bare _PORT counts only with an address in it: REAPER_METRIC_PORT=9090 is somebody's typing error.
    return name.endswith("_PORT") and bool(re.fullmatch(_LINK_VALUE, value.strip()))


def _unread(env: Mapping[str, str], known: set[str], factors: Iterable[str]) -> Iterable[str]:
    for name in sorted(env):
        if not env[name].strip():
            continue
        if name.startswith("REAPER_") and name not in known and not _is_service_link(name, env[name]):
            hint = did_you_mean(name, known)
            yield f"{ascii(name)[1:-1]} is not a variable of job-reaper and is ignored. {hint}".rstrip()
        elif name.endswith(_FACTOR) and name not in factors:
            stage = name.removesuffix(_FACTOR).lower()
            yield (
                f"{ascii(name)[1:-1]} is ignored: no stage is called like that. "
                f"Add {ascii(stage)[1:-1]} under stages in the file"
            )
