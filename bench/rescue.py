"""Rescue: a fleet has died; how fast do its jobs come back, beside the bare statements that write the same?

1,000,000 finished rows beside 100,000 expired ones over both tables, half of them exhausted, 500 holders, the
default indexes. Every side works on a byte-for-byte copy of the same database and must write the same rows
and events: what was written is compared row for row before a time counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.report import Result, middle
from bench.sql import query
from bench.stand import TABLES, Stand, Times, job_reaper
from reconciler.reaper import Reaper

FINISHED, EXPIRED = 1_000_000, 100_000
BATCH = 5_000
FLOOR = "floor"

Side = Callable[[Stand, str], None]
Writes = dict[str, tuple[Any, ...]]


def floor(stand: Stand, name: str, batch: int = BATCH) -> None:
    """The bare statements: one connection, one table after the other."""
    with stand.connect(name) as conn:
        # The floor shall have the best plan, the join by place, whatever the planner thinks.
        conn.execute("SET enable_hashjoin = off")
        conn.execute("SET enable_mergejoin = off")
        conn.execute("SET jit = off")
        for table in TABLES:
            statement, parameters = query("floor", "rescue", table=table), {"limit": batch, "name": table}
            while conn.execute(statement, parameters).rowcount == batch:
                pass


def command(**env: str) -> Side:
    """The real command, from the start of its process to its end."""

    def side(stand: Stand, name: str) -> None:
        process = job_reaper(stand.dsn(name), "once", "--output", "json", env=env)
        answer, _ = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"job-reaper once ended with {process.returncode}: {answer[-2000:]!r}")

    return side


def one_pass(**env: str) -> Side:
    """The same pass inside a process that is already there (`run`, `operator`, an application)."""

    def side(stand: Stand, name: str) -> None:
        reaper = Reaper(env={"DATABASE_URL": stand.dsn(name), **env})
        report = reaper.run_once()
        reaper.close()
        if not report.ok:
            raise RuntimeError(f"the pass failed: {report}")

    return side


SIDES: dict[str, Side] = {
    FLOOR: floor,
    "once": command(),
    "once, tables in turn": command(REAPER_PARALLEL="1"),
    "pass": one_pass(),
    "pass, tables in turn": one_pass(REAPER_PARALLEL="1"),
}


def measure(stand: Stand) -> Result:
    finished, expired = stand.rows(FINISHED), stand.rows(EXPIRED)
    template = prepared(stand, finished, expired)
    taken, writes = interleaved(stand, template, SIDES, stand.times(7))
    stand.drop(template)
    facts = summed(taken, expired) | {
        "finished_rows": finished,
        "expired_rows": expired,
        "writes": {table: list(written[:3]) for table, written in writes.items()},
    }
    return Result(
        name="rescue",
        title=f"{expired:,} expired beside {finished:,} finished rows, both tables",
        header=("side", "rows/s", "of the floor", "lowest", "highest", "fastest", "processor"),
        rows=[_row(side, numbers) for side, numbers in facts["sides"].items()],
        facts=facts,
        notes=(
            f"Medians of {len(taken[FLOOR])} interleaved repetitions; ratios are taken within a repetition.",
            "Fastest: the floor's fastest repetition against this side's: what is left when nobody disturbs.",
            "Processor: seconds of all sessions and of the client, as a ratio to the floor's; it grows",
            "far less than the wall's time when others use the machine.",
        ),
    )


def prepared(stand: Stand, finished: int, expired: int) -> str:
    """The template: what every side gets a copy of."""
    name = stand.migrated()
    stand.fill(name, "finished", finished)
    stand.fill(name, "expired", expired)
    stand.settle(name)
    return name


def interleaved(
    stand: Stand, template: str, sides: dict[str, Side], repetitions: int
) -> tuple[dict[str, list[Times]], Writes]:
    """Every side once per repetition, each time another one first; all must have written the same."""
    taken: dict[str, list[Times]] = {side: [] for side in sides}
    first: Writes | None = None
    order = list(sides)
    for _ in range(repetitions):
        for side in order:
            with stand.fresh(template) as name:
                with stand.clock() as clock:
                    sides[side](stand, name)
                taken[side] += clock
                writes = written(stand, name)
            first = first or writes
            if writes != first:
                raise AssertionError(f"{side} wrote {writes}, the first side {first}")
        order = [*order[1:], order[0]]
    assert first is not None
    return taken, first


def written(stand: Stand, name: str) -> Writes:
    """(queued, failed, events, digest of every row and event) per table."""
    with stand.connect(name) as conn:
        found = {
            table: conn.execute(query("fill", "writes", table=table), {"name": table}).fetchone()
            for table in TABLES
        }
    return {table: row for table, row in found.items() if row is not None}


def summed(taken: dict[str, list[Times]], rows: int) -> dict[str, Any]:
    """Medians: rows per second, and ratios taken within each repetition."""
    base = taken[FLOOR]
    sides: dict[str, Any] = {}
    for side, times in taken.items():
        ratios = [mine.wall and other.wall / mine.wall for other, mine in zip(base, times, strict=True)]
        work = [
            other.cpu / mine.cpu for other, mine in zip(base, times, strict=True) if mine.cpu and other.cpu
        ]
        sides[side] = {
            "rows_per_sec": round(rows / middle(one.wall for one in times)),
            "of_floor": round(middle(ratios), 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
            "fastest": round(min(one.wall for one in base) / min(one.wall for one in times), 3),
            "of_floor_processor": round(middle(work), 3) if work else None,
            "seconds": [round(one.wall, 3) for one in times],
        }
    return {"sides": sides}


def _row(side: str, numbers: dict[str, Any]) -> tuple[str, ...]:
    work = numbers["of_floor_processor"]
    return (
        side,
        f"{numbers['rows_per_sec']:,}",
        f"{numbers['of_floor']:.2f}",
        f"{numbers['lowest']:.2f}",
        f"{numbers['highest']:.2f}",
        f"{numbers['fastest']:.2f}",
        "-" if work is None else f"{work:.2f}",
    )
