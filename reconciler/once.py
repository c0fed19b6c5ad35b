"""`job-reaper once`: one pass, for the CronJob. The JSON object on stdout's last line is an interface."""

from __future__ import annotations

import json
import logging
import signal
from typing import Any

from reconciler.config import Settings
from reconciler.logs import say
from reconciler.reaper import Reaper
from reconciler.report import PassReport, TableReport


def run_once(settings: Settings, *, output: str) -> int:
    """One pass, its report on stdout, its exit code."""
    reaper = Reaper(settings=settings, with_metrics=settings.pushgateway_url is not None)
    # A pod that is told to go ends after its batch and gives the pass back, instead of holding it for 90 s.
    signal.signal(signal.SIGTERM, lambda *_: reaper.request_stop())
    try:
        report = reaper.run_once()
        if output == "json":
            document = as_json(report)
            document["totals"] = _totals(reaper)
            _line(json.dumps(document, default=str))
        else:
            for text in as_text(report):
                _line(text)
        if not report.skipped:  # the pass that ran pushes; ours would wipe out its numbers
            _push(reaper, settings)
    finally:
        reaper.close()
    return report.exit_code


def as_json(report: PassReport) -> dict[str, Any]:
    """The object of SPEC.md, to the letter."""
    return {
        "ok": report.ok,
        "dry_run": report.dry_run,
        "skipped": report.skipped,
        "pass_ms": round(report.pass_ms, 3),
        "tables": {
            name: {
                "ok": table.ok,
                "requeued": table.requeued_ids,
                "failed": table.failed_ids,
                "deferred": table.deferred_ids,
                "poisoned": [poison.id for poison in table.poisoned],
                "counts": table.counts,
                "error": _error(table),
                "scan_ms": round(table.scan_ms, 3),
            }
            for name, table in report.tables.items()
        },
    }


def as_text(report: PassReport) -> list[str]:
    """For a person: one line per table, then what went wrong."""
    if report.skipped:
        return [f"skipped: {report.skipped}"]
    would = "would be " if report.dry_run else ""
    lines = []
    for name, table in report.tables.items():
        counts = table.counts
        rest = ", ".join(
            f"{counts[key]} {key.replace('_', ' ')}"
            for key in ("deferred", "not_due", "moved_on", "unleased", "poisoned")
            if counts[key]
        )
        lines.append(
            f"{name}: {counts['requeued']} {would}requeued, {counts['failed']} {would}failed"
            + (f", {rest}" if rest else "")
            + f" ({table.scan_ms:.0f} ms)"
        )
        if table.braked:
            lines.append(f"{name}: brake: {table.braked}")
        if table.capped:
            lines.append(f"{name}: stopped at maxPerPass; the rest waits for the next pass")
        lines += [f"{name}: poisoned {poison.id}: {poison.error}" for poison in table.poisoned[:10]]
        if table.error:
            lines.append(f"{name}: error {table.error.code}: {table.error.message}")
    return lines


def _error(table: TableReport) -> dict[str, str] | None:
    """Poisoned rows make a table not ok; the error names the first, so that `ok: false` is never bare."""
    if table.error is not None:
        return {"code": table.error.code, "message": table.error.message}
    if table.poisoned:
        first = table.poisoned[0]
        count = table.counts["poisoned"]
        return {
            "code": "poisoned",
            "message": f"{count} could not be written; first {first.id}: {first.error}",
        }
    return None


def _totals(reaper: Reaper) -> list[dict[str, Any]]:
    """The counters kept in Postgres: a CronJob's pod lives too short to be scraped."""
    totals = reaper.totals()
    return [
        {"table": table, "outcome": outcome, "stage": stage or None, "reason": reason, "count": n}
        for (table, outcome, stage, reason), n in sorted(totals.counts.items() if totals else ())
    ]


def _push(reaper: Reaper, settings: Settings) -> None:
    if reaper.metrics is None or settings.pushgateway_url is None:
        return
    from http.client import HTTPException  # noqa: PLC0415 - only where a gateway is configured

    from prometheus_client import push_to_gateway  # noqa: PLC0415

    try:
        push_to_gateway(
            settings.pushgateway_url, settings.pushgateway_job, reaper.metrics.registry, timeout=5
        )
    except (OSError, HTTPException, ValueError) as error:
        # The pass is done and committed: a gateway that is down must not make it look failed.
        say("push to the Pushgateway failed", level=logging.WARNING, fields={"error": str(error)})


def _line(text: str) -> None:
    print(text)  # noqa: T201 - this is the command's output
