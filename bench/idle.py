"""Idle pass: nothing has expired. Its time must not depend on how many jobs have ever been finished.

10,000 live leases beside 0, 1 M and 5 M finished rows, on both index sets. All databases exist at once and
take turns, so that a busy minute of the machine hits all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from bench.report import Result, middle
from bench.stand import Stand
from reconciler.config import load
from reconciler.migrate import Heartbeats, migrate
from reconciler.reaper import Reaper
from reconciler.shape import read_shape
from reconciler.statements import Statements, policy_parameters

LIVE = 10_000
FINISHED = (0, 1_000_000, 5_000_000)
SETS: tuple[Heartbeats, ...] = ("default", "hot")


def measure(stand: Stand) -> Result:
    databases = _databases(stand)
    passes: dict[tuple[Heartbeats, int], list[float]] = {key: [] for key in databases}
    reapers = {key: Reaper(env={"DATABASE_URL": stand.dsn(name)}) for key, name in databases.items()}
    for warm in [True] * 3 + [False] * stand.times(31):
        for key, reaper in reapers.items():
            began = time.perf_counter()
            report = reaper.run_once()
            took = (time.perf_counter() - began) * 1000
            if not report.ok or any(table.counts["requeued"] for table in report.tables.values()):
                raise AssertionError(f"this pass was not idle: {report}")
            if not warm:
                passes[key].append(took)
    for reaper in reapers.values():
        reaper.close()
    scans = {key: survey(stand, name) for key, name in databases.items()}
    for name in databases.values():
        stand.drop(name)
    facts = {
        "live_rows": stand.rows(LIVE),
        "passes": [
            {
                "indexes": heartbeats,
                "finished_rows": rows,
                "pass_ms": round(middle(passes[heartbeats, rows]), 2),
                "of_smallest": round(
                    middle(passes[heartbeats, rows]) / middle(passes[heartbeats, _smallest(stand)]), 2
                ),
                "execution_ms": round(scans[heartbeats, rows].execution_ms, 3),
                "survey_ms": round(scans[heartbeats, rows].round_trip_ms, 3),
            }
            for heartbeats, rows in databases
        ],
        "plans": {
            heartbeats: scans[heartbeats, max(rows for _, rows in databases)].nodes for heartbeats in SETS
        },
    }
    return Result(
        name="idle",
        title=f"nothing expired, {stand.rows(LIVE):,} live leases over both tables",
        header=("indexes", "finished rows", "pass ms", "of the smallest", "survey ms", "in the server ms"),
        rows=[
            (
                one["indexes"],
                f"{one['finished_rows']:,}",
                f"{one['pass_ms']:.1f}",
                f"{one['of_smallest']:.2f}",
                f"{one['survey_ms']:.2f}",
                f"{one['execution_ms']:.2f}",
            )
            for one in facts["passes"]  # type: ignore[attr-defined]
        ],
        facts=facts,
        plan=[
            line
            for heartbeats in SETS
            for line in (f"{heartbeats}:", *facts["plans"][heartbeats], "")  # type: ignore[index]
        ],
    )


def _smallest(stand: Stand) -> int:
    return _rows(stand, FINISHED[0])


def _rows(stand: Stand, full: int) -> int:
    return stand.rows(full) if full else 0


def _databases(stand: Stand) -> dict[tuple[Heartbeats, int], str]:
    """Each size grows from the one before; the hot set is migrated from a copy, as an operator would."""
    made: dict[tuple[Heartbeats, int], str] = {}
    name = stand.migrated()
    stand.fill(name, "live", stand.rows(LIVE))
    have = 0
    for full in FINISHED:
        wanted = _rows(stand, full)
        if wanted > have:
            name = stand.copy(name)
            stand.fill(name, "finished", wanted - have)
        have = wanted
        stand.settle(name)
        made["default", wanted] = name
    for full in FINISHED:
        wanted = _rows(stand, full)
        hot = stand.copy(made["default", wanted])
        migrate(stand.dsn(hot), heartbeats="hot")
        stand.settle(hot)
        made["hot", wanted] = hot
    return made


@dataclass(frozen=True, slots=True)
class Scan:
    """The statement that decides that nothing is to be done: seen from the client, and inside the server."""

    round_trip_ms: float
    execution_ms: float
    nodes: list[str]


def survey(stand: Stand, name: str) -> Scan:
    """Ask one table many times."""
    settings = load(env={"DATABASE_URL": stand.dsn(name)})
    spec = settings.table_specs()[0]
    with stand.connect(name) as conn:
        shape = read_shape(conn, spec)
        statement = Statements(shape).survey
        parameters: dict[str, Any] = {**policy_parameters(settings.policy(), shape), "as_of": None}
        conn.execute(statement, parameters)
        took: list[float] = []
        inside: list[float] = []
        plan: dict[str, Any] = {}
        for _ in range(stand.times(31)):
            began = time.perf_counter()
            conn.execute(statement, parameters)
            took.append((time.perf_counter() - began) * 1000)
            explain = sql.SQL("EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) ") + statement
            row = conn.execute(explain, parameters).fetchone()
            assert row is not None
            inside.append(row[0][0]["Execution Time"])
            plan = row[0][0]["Plan"]
    return Scan(middle(took), middle(inside), list(_visits(plan)))


def _visits(plan: dict[str, Any]) -> Iterator[str]:
    """Every scan that was run: how, by which index, how many rows it looked at."""
    for part in plan.get("Plans", ()):
        yield from _visits(part)
    if "Scan" in plan["Node Type"] and "Subquery" not in plan["Node Type"] and plan["Actual Loops"]:
        rows = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
        by = f" using {plan['Index Name']}" if "Index Name" in plan else ""
        yield f"{plan['Node Type']}{by}: {rows:g} rows"
