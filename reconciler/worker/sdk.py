"""What every primitive must know: the tables' names and the policy's numbers.

Read once per process from the environment and REAPER_CONFIG, the same sources the reaper reads, so that
both sides compute the same lease. A test, or an app with its own configuration, says it explicitly:
`configure(Sdk(...))` for the process, or `sdk=` for one call.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from reconciler.backoff import JITTER, ladder
from reconciler.model import Policy, TableSpec
from reconciler.sla import MAX_LEASE_SEC
from reconciler.worker.errors import ArgumentError


def _default_tables() -> Mapping[str, TableSpec]:
    return MappingProxyType({name: TableSpec(name=name, table=name) for name in ("jobs", "asr_jobs")})


class _Settings(Protocol):
    """What `reconciler.config.load()` returns, as far as the SDK needs it."""

    def policy(self) -> Policy: ...

    def table_specs(self) -> Iterable[TableSpec]: ...

    @property
    def state_schema(self) -> str | None: ...

    @property
    def state_table(self) -> str: ...

    @property
    def max_concurrency(self) -> int: ...

    @property
    def worker(self) -> Any: ...


@dataclass(frozen=True)
class Sdk:
    """Tables by name, and the policy. Frozen: a worker does not change its mind between two beats."""

    policy: Policy = field(default_factory=Policy)
    tables: Mapping[str, TableSpec] = field(default_factory=_default_tables)
    state: tuple[str, ...] = ("reaper_state",)
    max_concurrency: int = 5
    scratch_dir: str | None = None

    @classmethod
    def of(cls, settings: _Settings) -> Sdk:
        """From the settings that `reconciler.config.load()` returns."""
        tables = {spec.name: spec for spec in settings.table_specs()}
        return cls(
            policy=settings.policy(),
            tables=MappingProxyType(tables),
            state=tuple(part for part in (settings.state_schema, settings.state_table) if part),
            max_concurrency=settings.max_concurrency,
            scratch_dir=settings.worker.scratch_dir,
        )

    def spec(self, table: str) -> TableSpec:
        """The table of that name, or an error that lists the names there are."""
        try:
            return self.tables[table]
        except (KeyError, TypeError):
            raise ArgumentError(
                "table", table, f"allowed: {', '.join(self.tables)}", "REAPER_TABLES adds more"
            ) from None

    def plain(self) -> Sdk:
        """The same without read-only mappings, which cannot be sent to another process."""
        sla = replace(self.policy.sla, factors=dict(self.policy.sla.factors))
        return replace(self, policy=replace(self.policy, sla=sla), tables=dict(self.tables))

    @cached_property
    def lease_params(self) -> dict[str, Any]:
        """The numbers from which the statements compute a lease."""
        sla = self.policy.sla
        return {
            "default_lease_sec": sla.default_lease_sec,
            "factors": json.dumps({stage: str(factor) for stage, factor in sla.factors.items()}),
            "max_lease_sec": MAX_LEASE_SEC,
        }

    @cached_property
    def retry_params(self) -> dict[str, Any]:
        """The numbers from which the statements compute a delay."""
        return {"ladder": list(ladder(self.policy.backoff)), "jitter": JITTER}


_lock = threading.Lock()
_current: Sdk | None = None


def configure(sdk: Sdk | _Settings | None) -> None:
    """Use this for the whole process; None reads the environment again at the next call."""
    global _current  # noqa: PLW0603 - one per process is the point
    with _lock:
        _current = sdk if isinstance(sdk, Sdk) or sdk is None else Sdk.of(sdk)


def current(sdk: Sdk | None = None) -> Sdk:
    """The explicit one, else the process's own, read on first use."""
    global _current  # noqa: PLW0603
    if sdk is not None:
        return sdk
    with _lock:
        if _current is None:
            # Late: reading files and validating them costs more than the rest of the SDK together.
            from reconciler.config import load  # noqa: PLC0415

            _current = Sdk.of(load())
        return _current
