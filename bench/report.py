"""What a measurement hands back, how it is shown, and where it is kept."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = Path(os.environ.get("BENCH_RESULTS", HERE / "results"))
NUMBERS = HERE / "numbers.json"
"""The numbers the documentation shows, committed: written by --publish from a run at full scale."""

PAGE = HERE.parent / "docs" / "reference" / "benchmarks.md"
BEGIN, END = "<!-- numbers of {name} -->", "<!-- end of {name} -->"


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement. `facts` are for machines, the table is for people; both say the same."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    facts: dict[str, Any]
    notes: Sequence[str] = ()
    plan: Sequence[str] = ()
    where: dict[str, Any] = field(default_factory=dict)


def where(postgres: str, scale: float) -> dict[str, Any]:
    """The circumstances a number belongs to. No names and no paths of the machine."""
    return {
        "postgres": postgres,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "scale": scale,
        "at": datetime.now(UTC).isoformat(timespec="minutes"),
        "load": round(os.getloadavg()[0], 1),
    }


def middle(values: Iterable[float]) -> float:
    return float(median(values))


def shown(result: Result) -> str:
    """The table as text; Markdown, so that it can be pasted anywhere."""
    lines = [f"## {result.name}: {result.title}", "", *_table(result)]
    if result.plan:
        lines += ["", *(f"    {line}" for line in result.plan)]
    lines += ["", *result.notes] if result.notes else []
    return "\n".join([*lines, ""])


def keep(result: Result) -> Path:
    """Write the whole result below bench/results."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / f"{result.name}.json"
    target.write_text(json.dumps(asdict(result), indent=2, ensure_ascii=False) + "\n")
    return target


def publish(result: Result) -> None:
    """Make this run the one that bench/numbers.json and the documentation show."""
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    numbers[result.name] = {"where": result.where, **result.facts}
    NUMBERS.write_text(json.dumps(dict(sorted(numbers.items())), indent=2) + "\n")
    begin, end = BEGIN.format(name=result.name), END.format(name=result.name)
    text = PAGE.read_text()
    if begin not in text or end not in text:
        raise SystemExit(f"{PAGE.name} has no place for {result.name}: add {begin} and {end}")
    before, after = text.split(begin)[0], text.split(end, 1)[1]
    place = result.where
    said = (
        f"Measured {place['at'][:10]}: Postgres {place['postgres']}, Python {place['python']},"
        f" {place['processors']} processors, load average {place['load']} before and"
        f" {place['load_after']} after."
    )
    block = "\n".join([begin, "", *_table(result), "", said, "", end])
    PAGE.write_text(before + block + after)


def _table(result: Result) -> list[str]:
    columns = list(zip(result.header, *result.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        others = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "| " + " | ".join([first, *others]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return [line(result.header), rule, *map(line, result.rows)]
