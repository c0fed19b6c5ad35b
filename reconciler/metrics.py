"""Every metric name, and nothing else that counts.

Names and labels are for ever (docs/reference/events-log-metrics.md). Counters come from Postgres where it
keeps them (a CronJob's pod lives too short to be scraped); histograms live in the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from reconciler.report import Page, PassReport, TableReport
from reconciler.state import Totals
from reconciler.statements import RECOVERY_BUCKETS_SEC
from reconciler.store import OTHER_STAGE

_SCAN_BUCKETS_MS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 15_000, 60_000, 300_000)


class Metrics:
    """The reaper's metrics in a registry of their own."""

    def __init__(self, stages: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self._stages = frozenset(stages)
        self._own: dict[tuple[str, str, str, str], int] = {}
        self._totals: Mapping[tuple[str, str, str, str], int] | None = None
        self.registry.register(_Counters(self))
        self._scan = Histogram(
            "reaper_scan_duration_ms",
            "Time to serve one table in a pass, in milliseconds",
            ["table"],
            buckets=_SCAN_BUCKETS_MS,
            registry=self.registry,
        )
        self._recovery: dict[str, tuple[list[int], float]] = {}
        gauge = self._gauge
        self._oldest = gauge(
            "reaper_oldest_expired_seconds", "Age of the oldest expired lease at the scan", "table"
        )
        self._unleased = gauge(
            "reaper_unleased_jobs", "Jobs in processing without any stamp: never touched", "table"
        )
        self._deferred = gauge("reaper_deferred_jobs", "Expired jobs spared in the last pass", "table")
        self._poisoned = gauge(
            "reaper_poisoned_jobs", "Jobs that could not be written in the last pass", "table"
        )
        self._braked = gauge("reaper_brake_open", "1 while a brake keeps the table unchanged", "table")
        self._table_ok = gauge(
            "reaper_table_ok", "1 if the table was served without error in the last pass", "table"
        )
        self._success = gauge(
            "reaper_last_success_timestamp_seconds", "When a pass last succeeded (Postgres' clock)"
        )

    def page(self, table: str, page: Page) -> None:
        """Take one batch in."""
        for group in page.groups:
            key = (table, group.outcome, self.stage_label(group.stage or ""), group.reason)
            self._own[key] = self._own.get(key, 0) + group.n
            if group.outcome == "requeued" and group.bucket is not None:
                counts, total = self._recovery.get(table, ([0] * (len(RECOVERY_BUCKETS_SEC) + 1), 0.0))
                counts[group.bucket] += group.n
                self._recovery[table] = (counts, total + group.overdue_sum)

    def table(self, report: TableReport) -> None:
        """Take one table's report in."""
        name = report.name
        self._scan.labels(name).observe(report.scan_ms)
        self._oldest.labels(name).set(report.oldest_sec)
        self._unleased.labels(name).set(report.counts["unleased"])
        self._deferred.labels(name).set(report.counts["deferred"])
        self._poisoned.labels(name).set(report.counts["poisoned"])
        self._braked.labels(name).set(1 if report.braked else 0)
        self._table_ok.labels(name).set(1 if report.ok else 0)

    def passed(self, report: PassReport, totals: Totals | None, *, now: float) -> None:
        """Take a whole pass in. Totals kept in Postgres outlive this process and hold what it did; while they
        cannot be kept, what we did ourselves is added to the last ones known."""
        if totals is not None:
            self._totals = totals.counts
            self._own = {}
            if totals.last_success is not None:
                self._success.set(totals.last_success)
        elif report.ok and not report.skipped:
            self._success.set(now)

    def counts(self) -> Mapping[tuple[str, str, str, str], int]:
        sums = dict(self._totals or {})
        for key, n in list(self._own.items()):
            sums[key] = sums.get(key, 0) + n
        return sums

    def stage_label(self, stage: str) -> str:
        """A stage nobody configured reads `other`: a typo in a row must not become a time series."""
        return stage if stage in self._stages else OTHER_STAGE

    def recoveries(self) -> Mapping[str, tuple[list[int], float]]:
        """Per table: jobs by bucket (not cumulated) and their summed seconds; SQL did the bucketing."""
        return self._recovery

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)


class _Counters(Collector):
    """What is summed up elsewhere, read when scraped."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        names = {
            "requeued": ("reaper_requeues", "Jobs handed back to the queue"),
            "failed": ("reaper_failures", "Jobs ended because their attempts are used up"),
        }
        for outcome, (name, text) in names.items():
            family = CounterMetricFamily(name, text, labels=["table", "stage", "reason"])
            sums: dict[tuple[str, str, str], int] = {}
            for (table, what, stage, reason), n in list(self._metrics.counts().items()):
                if what == outcome:
                    key = (table, self._metrics.stage_label(stage), reason)
                    sums[key] = sums.get(key, 0) + n
            for labels, n in sums.items():
                family.add_metric(labels, n)
            yield family
        histogram = HistogramMetricFamily(
            "reaper_time_to_recover_seconds", "From the lease's expiry to the requeue", labels=["table"]
        )
        for table, (counts, total) in list(self._metrics.recoveries().items()):
            bounds = [*map(str, RECOVERY_BUCKETS_SEC), "+Inf"]
            histogram.add_metric([table], list(zip(bounds, accumulate(counts), strict=True)), total)
        yield histogram
