"""Every metric by its name for ever: values, labels, and which of two counts wins."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from reconciler.metrics import Metrics
from reconciler.report import Group, Page, PassReport, TableFault, TableReport
from reconciler.state import Totals
from reconciler.statements import RECOVERY_BUCKETS_SEC

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(metrics: Metrics) -> Samples:
    """What Prometheus would read, parsed by its own parser."""
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return scraped(metrics).get((name, tuple(sorted(labels.items()))))


def a_page(*groups: Group) -> Page:
    return Page(0, None, None, {}, (), fresh=True, changes=(), groups=groups, holders=())


def requeues(
    n: int, stage: str | None = "asr", reason: str = "lease_expired", bucket: int | None = 3
) -> Group:
    return Group("requeued", reason, stage, bucket, n, overdue_sum=20.0 * n)


def failures(n: int, stage: str | None = "asr") -> Group:
    return Group("failed", "lease_expired", stage, 3, n, overdue_sum=20.0 * n)


def test_requeues_and_failures_are_counted_by_table_stage_and_reason() -> None:
    metrics = Metrics(["asr", "clip"])
    metrics.page("jobs", a_page(requeues(2), requeues(1, "clip"), failures(4)))
    metrics.page("jobs", a_page(requeues(3), requeues(5, reason="stale")))
    metrics.page("asr_jobs", a_page(requeues(7)))
    labels = {"table": "jobs", "stage": "asr"}
    assert value(metrics, "reaper_requeues_total", **labels, reason="lease_expired") == 5
    assert value(metrics, "reaper_requeues_total", **labels, reason="stale") == 5
    assert value(metrics, "reaper_requeues_total", table="jobs", stage="clip", reason="lease_expired") == 1
    assert value(metrics, "reaper_requeues_total", table="asr_jobs", stage="asr", reason="lease_expired") == 7
    assert value(metrics, "reaper_failures_total", **labels, reason="lease_expired") == 4


def test_stages_nobody_configured_read_other() -> None:
    metrics = Metrics(["asr"])
    metrics.page("jobs", a_page(requeues(1, "tpyo"), requeues(2, None), requeues(4, ""), requeues(8)))
    labels = {"table": "jobs", "reason": "lease_expired"}
    assert value(metrics, "reaper_requeues_total", stage="other", **labels) == 7
    assert value(metrics, "reaper_requeues_total", stage="asr", **labels) == 8
    assert value(metrics, "reaper_requeues_total", stage="tpyo", **labels) is None


def test_totals_kept_in_postgres_win_over_what_this_process_counted() -> None:
    metrics = Metrics(["asr"])
    metrics.page("jobs", a_page(requeues(1)))
    metrics.passed(PassReport(), Totals({("jobs", "requeued", "asr", "lease_expired"): 100}, 1234.5), now=9.0)
    labels = {"table": "jobs", "stage": "asr", "reason": "lease_expired"}
    assert value(metrics, "reaper_requeues_total", **labels) == 100
    assert value(metrics, "reaper_last_success_timestamp_seconds") == 1234.5
    metrics.passed(PassReport(), Totals({("jobs", "requeued", "asr", "lease_expired"): 101}, None), now=9.0)
    assert value(metrics, "reaper_requeues_total", **labels) == 101
    assert value(metrics, "reaper_last_success_timestamp_seconds") == 1234.5


def test_without_a_state_table_success_is_told_by_our_own_clock() -> None:
    metrics = Metrics([])
    failed = PassReport({"jobs": TableReport("jobs", error=TableFault("x", "y"))})
    metrics.passed(failed, None, now=1.0)
    metrics.passed(PassReport(skipped="another runs it"), None, now=2.0)
    assert value(metrics, "reaper_last_success_timestamp_seconds") == 0
    metrics.passed(PassReport(), None, now=3.0)
    assert value(metrics, "reaper_last_success_timestamp_seconds") == 3


def test_time_to_recover_is_a_histogram_of_requeues_only() -> None:
    metrics = Metrics(["asr"])
    beyond = len(RECOVERY_BUCKETS_SEC)
    metrics.page(
        "jobs",
        a_page(
            requeues(2, bucket=0),
            requeues(3, bucket=2),
            requeues(1, bucket=beyond),
            failures(9),
            requeues(5, bucket=None),
        ),
    )
    name = "reaper_time_to_recover_seconds"

    def bucket(le: str) -> float | None:
        return value(metrics, f"{name}_bucket", table="jobs", le=le)

    assert bucket("1.0") == 2
    assert bucket("5.0") == 2
    assert bucket("15.0") == 5
    assert bucket("86400.0") == 5
    assert bucket("+Inf") == 6
    assert value(metrics, f"{name}_count", table="jobs") == 6
    assert value(metrics, f"{name}_sum", table="jobs") == 20.0 * 6


def test_a_table_report_sets_its_gauges_and_observes_its_scan() -> None:
    metrics = Metrics([])
    report = TableReport("jobs", braked="share", oldest_sec=77.0, scan_ms=12.0)
    report.counts |= {"unleased": 1, "deferred": 2, "poisoned": 3}
    metrics.table(report)
    assert value(metrics, "reaper_scan_duration_ms_count", table="jobs") == 1
    assert value(metrics, "reaper_scan_duration_ms_sum", table="jobs") == 12
    assert value(metrics, "reaper_scan_duration_ms_bucket", table="jobs", le="10.0") == 0
    assert value(metrics, "reaper_scan_duration_ms_bucket", table="jobs", le="25.0") == 1
    gauges = {
        "reaper_oldest_expired_seconds": 77,
        "reaper_unleased_jobs": 1,
        "reaper_deferred_jobs": 2,
        "reaper_poisoned_jobs": 3,
        "reaper_brake_open": 1,
        "reaper_table_ok": 0,
    }
    assert {name: value(metrics, name, table="jobs") for name in gauges} == gauges
    metrics.table(TableReport("jobs"))
    assert {name: value(metrics, name, table="jobs") for name in gauges} == dict.fromkeys(gauges, 0) | {
        "reaper_table_ok": 1
    }


def test_the_names_are_the_documented_ones() -> None:
    metrics = Metrics(["asr"])
    metrics.page("jobs", a_page(requeues(1), failures(1)))
    metrics.table(TableReport("jobs"))
    families = {family.name for family in metrics.registry.collect()}
    assert families == {
        "reaper_requeues",
        "reaper_failures",
        "reaper_scan_duration_ms",
        "reaper_time_to_recover_seconds",
        "reaper_oldest_expired_seconds",
        "reaper_unleased_jobs",
        "reaper_deferred_jobs",
        "reaper_poisoned_jobs",
        "reaper_brake_open",
        "reaper_table_ok",
        "reaper_last_success_timestamp_seconds",
    }


def test_two_reapers_in_one_process_do_not_share_a_registry() -> None:
    one, two = Metrics(["asr"]), Metrics(["asr"])
    one.page("jobs", a_page(requeues(1)))
    assert one.counts() != two.counts()
    assert one.registry is not two.registry
