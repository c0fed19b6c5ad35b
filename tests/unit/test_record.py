"""What a pass tells: lines for the eye, within bounds, and no line for what a dry run did not do."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reconciler import record
from reconciler.logs import LOGGER, say, to_stderr
from reconciler.metrics import Metrics
from reconciler.record import OTHERS, LineBudget, PassRecorder, pass_line
from reconciler.report import Change, Group, HolderGroup, Page, PassReport, Poison, TableFault, TableReport

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The JSON lines written since the last look, with the logger put back afterwards."""
    kept = (LOGGER.handlers, LOGGER.propagate, LOGGER.level)
    stream = io.StringIO()
    to_stderr("info", stream)

    def read() -> list[dict[str, Any]]:
        text = stream.getvalue()
        stream.seek(0)
        stream.truncate()
        return [json.loads(line) for line in text.splitlines()]

    yield read
    LOGGER.handlers, LOGGER.propagate = kept[0], kept[1]
    LOGGER.setLevel(kept[2])


def a_change(id_: object = "j1", outcome: str = "requeued", **more: Any) -> Change:
    fields: dict[str, Any] = {
        "reason": "lease_expired",
        "event": "reaper:requeued",
        "verdict": "UNKNOWN",
        "locked_by": "w",
        "stage": "asr",
        "attempt": 1,
        "max_attempts": 3,
        "backoff_sec": 30.5,
        "fail_code": None,
        "overdue_sec": 12.0,
    }
    return Change(id_, outcome, **(fields | more))


def a_page(
    changes: tuple[Change, ...] = (), groups: tuple[Group, ...] = (), holders: tuple[HolderGroup, ...] = ()
) -> Page:
    return Page(
        rows=len(changes),
        last_key=None,
        edge=None,
        judged={},
        deferred=(),
        fresh=True,
        changes=changes,
        groups=groups,
        holders=holders,
    )


@pytest.mark.parametrize(
    ("outcome", "dry_run", "message"),
    [
        ("requeued", False, "job requeued"),
        ("failed", False, "job failed"),
        ("requeued", True, "job would be requeued"),
        ("failed", True, "job would be failed"),
    ],
)
def test_a_changed_job_is_one_line(lines: Lines, outcome: str, dry_run: bool, message: str) -> None:
    PassRecorder().page("jobs", a_page((a_change(outcome=outcome),)), dry_run=dry_run)
    (line,) = lines()
    assert line["msg"] == message
    assert line["level"] == "info"
    assert {
        key: line[key] for key in ("table", "id", "reason", "verdict", "locked_by", "stage", "backoff_sec")
    } == {
        "table": "jobs",
        "id": "j1",
        "reason": "lease_expired",
        "verdict": "UNKNOWN",
        "locked_by": "w",
        "stage": "asr",
        "backoff_sec": 30.5,
    }
    assert "outcome" not in line


def test_an_id_and_a_pod_of_any_kind_become_json(lines: Lines) -> None:
    pod = {"name": "w-0", "reason": "OOMKilled"}
    page = a_page((a_change(7, pod=pod), a_change("ü'\"\n"), a_change(None)))
    PassRecorder().page("jobs", page, dry_run=False)
    seven, odd, none = lines()
    assert (seven["id"], seven["pod"]) == (7, pod)
    assert odd["id"] == "ü'\"\n"
    assert none["id"] is None


def test_jobs_beyond_the_told_ones_are_one_line_per_holder_and_reason(lines: Lines) -> None:
    recorder = PassRecorder()
    for _ in range(2):
        recorder.page(
            "jobs",
            a_page(
                holders=(
                    HolderGroup("requeued", "lease_expired", "w1", 10),
                    HolderGroup("failed", "lease_expired", "w1", 1),
                    HolderGroup("requeued", "stale", None, 2),
                )
            ),
            dry_run=False,
        )
    assert lines() == []  # the sums are told when the table is done
    recorder.table(TableReport("jobs"), dry_run=False)
    told = [(line["msg"], line["reason"], line["locked_by"], line["jobs"]) for line in lines()]
    assert told == [
        ("jobs requeued", "lease_expired", "w1", 20),
        ("jobs failed", "lease_expired", "w1", 2),
        ("jobs requeued", "stale", None, 4),
    ]
    recorder.table(TableReport("jobs"), dry_run=False)
    assert lines() == []


def test_sums_of_a_dry_run_say_would(lines: Lines) -> None:
    recorder = PassRecorder()
    recorder.page("jobs", a_page(holders=(HolderGroup("requeued", "stale", "w", 2),)), dry_run=True)
    recorder.table(TableReport("jobs"), dry_run=True)
    assert [line["msg"] for line in lines()] == ["jobs would be requeued"]


def test_a_table_tells_only_its_own_sums(lines: Lines) -> None:
    recorder = PassRecorder()
    for table in ("jobs", "asr_jobs"):
        recorder.page(table, a_page(holders=(HolderGroup("requeued", "stale", "w", 2),)), dry_run=False)
    recorder.table(TableReport("asr_jobs"), dry_run=False)
    assert [line["table"] for line in lines()] == ["asr_jobs"]
    recorder.table(TableReport("jobs"), dry_run=False)
    assert [line["table"] for line in lines()] == ["jobs"]


def test_holders_beyond_the_limit_share_one_sum(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "HOLDERS_AT_MOST", 2)
    recorder = PassRecorder()
    groups = tuple(HolderGroup("requeued", "stale", f"w{n}", 1) for n in range(5))
    recorder.page("jobs", a_page(holders=groups), dry_run=False)
    recorder.page("jobs", a_page(holders=groups), dry_run=False)
    recorder.table(TableReport("jobs"), dry_run=False)
    assert [(line["locked_by"], line["jobs"]) for line in lines()] == [("w0", 2), ("w1", 2), (OTHERS, 6)]


def test_a_poisoned_row_is_an_error_line_with_its_id(lines: Lines) -> None:
    PassRecorder().poisoned("jobs", Poison("j1", "trigger says no"))
    (line,) = lines()
    assert (line["level"], line["table"], line["id"], line["error"]) == (
        "error",
        "jobs",
        "j1",
        "trigger says no",
    )


def test_a_crash_is_told_with_its_traceback(lines: Lines) -> None:
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError as error:
        PassRecorder().crashed("jobs", error)
    (line,) = lines()
    assert (line["level"], line["table"]) == ("error", "jobs")
    assert "ZeroDivisionError: a bug" in line["traceback"]


def test_what_a_table_report_says(lines: Lines) -> None:
    report = TableReport("jobs", braked="too many", error=TableFault("missing_column", "no column x"))
    report.counts["unleased"] = 4
    PassRecorder().table(report, dry_run=False)
    brake, unleased, error = lines()
    assert (brake["level"], brake["why"]) == ("warning", "too many")
    assert (unleased["level"], unleased["jobs"]) == ("warning", 4)
    assert (error["level"], error["code"], error["error"]) == ("error", "missing_column", "no column x")


def test_a_quiet_table_says_nothing(lines: Lines) -> None:
    PassRecorder().table(TableReport("jobs"), dry_run=False)
    assert lines() == []


def test_metrics_take_in_pages_but_not_those_of_a_dry_run() -> None:
    metrics = Metrics(["asr"])
    recorder = PassRecorder(metrics)
    page = a_page(groups=(Group("requeued", "stale", "asr", 1, 3, 9.0),))
    recorder.page("jobs", page, dry_run=True)
    assert metrics.counts() == {}
    recorder.page("jobs", page, dry_run=False)
    assert metrics.counts() == {("jobs", "requeued", "asr", "stale"): 3}


def test_the_pass_line_holds_all_counts(lines: Lines) -> None:
    report = PassReport(
        {"jobs": TableReport("jobs"), "asr_jobs": TableReport("asr_jobs", capped=True)}, pass_ms=12.34
    )
    report.tables["jobs"].counts["requeued"] = 2
    pass_line(report, counters_kept=True)
    (line,) = lines()
    assert (line["msg"], line["level"], line["pass_ms"]) == ("pass done", "info", 12.3)
    assert (line["dry_run"], line["counters_kept"]) == (False, True)
    assert "brake" not in line
    assert line["tables"]["jobs"]["requeued"] == 2
    assert line["tables"]["asr_jobs"]["capped"] is True
    assert set(line["tables"]["jobs"]) == {
        "requeued",
        "failed",
        "deferred",
        "moved_on",
        "not_due",
        "unleased",
        "poisoned",
    }


def test_the_pass_line_of_a_failed_pass_is_an_error(lines: Lines) -> None:
    report = PassReport({"jobs": TableReport("jobs", error=TableFault("x", "y"))})
    pass_line(report, counters_kept=False, brake="silent fleet")
    (line,) = lines()
    assert (line["msg"], line["level"], line["brake"]) == ("pass done with errors", "error", "silent fleet")


def test_a_skipped_pass_says_why(lines: Lines) -> None:
    pass_line(PassReport(skipped="other/1 runs this pass"), counters_kept=True)
    (line,) = lines()
    assert (line["msg"], line["why"], line["level"]) == ("pass skipped", "other/1 runs this pass", "info")


def test_our_lines_do_not_reach_an_applications_root_logger(lines: Lines) -> None:
    root = io.StringIO()
    handler = logging.StreamHandler(root)
    logging.getLogger().addHandler(handler)
    try:
        say("hello", level=logging.WARNING)
    finally:
        logging.getLogger().removeHandler(handler)
    assert [line["msg"] for line in lines()] == ["hello"]
    assert root.getvalue() == ""


def test_all_tables_of_a_pass_share_its_thousand_lines(lines: Lines) -> None:
    budget = LineBudget(3)
    first, second = PassRecorder(lines=budget), PassRecorder(lines=budget)
    first.page("jobs", a_page(changes=(a_change(), a_change())), dry_run=False)
    second.page("asr_jobs", a_page(changes=(a_change(), a_change(), a_change())), dry_run=False)
    second.table(TableReport("asr_jobs"), dry_run=False)
    told = lines()
    assert [line["msg"] for line in told] == ["job requeued"] * 3 + ["jobs requeued"]
    assert told[-1]["jobs"] == 2
