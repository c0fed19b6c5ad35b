"""The worker's counters. Counting costs a dict update; prometheus_client is loaded only to show them.

Names are the documents' with `_` for `.`. They live for ever: see docs/reference/worker.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_REGISTERED: list[Metric] = []


@dataclass(eq=False)
class Metric:
    """A counter or gauge with at most one label; safe to change from any thread."""

    name: str
    help: str
    kind: str = "counter"
    label: str | None = None
    _values: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        _REGISTERED.append(self)
        if self.label is None:
            self._values[""] = 0.0

    def add(self, amount: float = 1, **labels: str) -> None:
        """Count. A gauge goes down with a negative amount."""
        key = self._key(labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def set(self, value: float, **labels: str) -> None:
        """A gauge's level."""
        with self._lock:
            self._values[self._key(labels)] = value

    def value(self, **labels: str) -> float:
        """What has been counted so far: for tests and for `Worker.stats()`."""
        with self._lock:
            return self._values.get(self._key(labels), 0.0)

    def samples(self) -> list[tuple[str, float]]:
        """All (label value, number) pairs."""
        with self._lock:
            return sorted(self._values.items())

    def _key(self, labels: dict[str, str]) -> str:
        if self.label is None:
            if labels:
                raise TypeError(f"{self.name} has no labels")
            return ""
        return labels[self.label]


HEARTBEATS = Metric("worker_heartbeats_total", "Batch updates that beat all active jobs")
HEARTBEAT_FAILURES = Metric("worker_heartbeat_failures_total", "Batch updates that failed")
RECOVERED_JOBS = Metric(
    "worker_recovered_jobs_total", "Claims of jobs that a dead run had left behind", label="reason"
)
RETRY_ATTEMPTS = Metric("worker_retry_attempts_total", "Runs that asked to be run again", label="code")
CONCURRENT_JOBS = Metric("worker_concurrent_jobs", "Jobs running in this worker now", kind="gauge")
ACQUIRE_CONFLICTS = Metric(
    "worker_acquire_conflicts_total", "Claims by id that found the job taken, not due or exhausted"
)
LEASES_LOST = Metric(
    "worker_leases_lost_total", "Runs cancelled because their fence no longer held, or could not be kept",
    label="reason",
)  # fmt: skip
BEAT_LAG = Metric("worker_heartbeat_lag_seconds", "How late the last round of beats was", kind="gauge")


class _Collector:
    """Shows the counters to prometheus_client whenever it asks."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - see above

        for metric in _REGISTERED:
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            shown = family(metric.name, metric.help, labels=[metric.label] if metric.label else None)
            for label, value in metric.samples():
                shown.add_metric([label] if metric.label else [], value)
            yield shown


def all_metrics() -> tuple[Metric, ...]:
    """Every metric a worker has."""
    return tuple(_REGISTERED)


def register(registry: Any = None) -> None:
    """Add the worker's metrics to a prometheus_client registry (default: the global one)."""
    from prometheus_client import REGISTRY  # noqa: PLC0415

    (registry if registry is not None else REGISTRY).register(_Collector())


def serve(port: int, host: str = "0.0.0.0") -> Any:  # noqa: S104 - a pod's scraper comes from outside
    """Serve `/metrics` of this worker alone on a port; returns the server, which `shutdown()` stops."""
    from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415

    registry = CollectorRegistry()
    register(registry)
    server, _ = start_http_server(port, addr=host, registry=registry)
    return server
