"""Cold start: from the start of `job-reaper once` to the first query that reaches the server.

A CronJob starts every minute, so this is paid every minute. The server's log says when the query came; it
and we read the same clock of the same machine. The yardstick is `python -c "import psycopg"` until the import
is done, which is less than the whole run of that command; a bare connect and query is shown beside it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass

from bench.report import Result, middle
from bench.stand import ROOT, Stand, plain_environment

_SEEN = re.compile(r"^(\d+\.\d+) seen .*?(?:statement|execute [^:]*): (?!BEGIN)", re.MULTILINE)
_IMPORT = "import psycopg, time; print(time.time())"
_BARE = "import os, psycopg; psycopg.connect(os.environ['DATABASE_URL']).execute('select 1')"


def measure(stand: Stand) -> Result:
    name = stand.migrated()
    for setting in ("log_statement = 'all'", "log_min_messages = 'log'"):
        stand.alter(name, setting)
    taken: dict[str, list[float]] = {
        'python -c "import psycopg", imported': [],
        'python -c "import psycopg", whole': [],
        "python, psycopg, first query": [],
        "job-reaper once, first query": [],
        "job-reaper once, whole": [],
    }
    yardstick, import_whole, bare, first, whole = taken
    for warm in [True] * 2 + [False] * stand.times(21):
        imported = _run(stand, name, "-c", _IMPORT)
        queried = _run(stand, name, "-c", _BARE)
        once = _run(stand, name, "-m", "reconciler", "once", "--output", "json")
        if warm:
            continue
        taken[yardstick].append(float(imported.said) - imported.started)
        taken[import_whole].append(imported.whole)
        taken[bare].append(queried.first_query)
        taken[first].append(once.first_query)
        taken[whole].append(once.whole)
    stand.drop(name)
    base = taken[yardstick]
    facts = {
        side: {
            "ms": round(middle(times) * 1000, 1),
            "of_import": round(middle(mine / other for mine, other in zip(times, base, strict=True)), 2),
        }
        for side, times in taken.items()
    }
    return Result(
        name="coldstart",
        title="from process start, a database with nothing to do",
        header=("process", "ms", "of the import", "at most"),
        rows=[
            (side, f"{one['ms']:.0f}", f"{one['of_import']:.2f}", "2.50" if side == first else "")
            for side, one in facts.items()
        ],
        facts={"runs": len(base), "sides": facts},
        notes=(f"Medians of {len(base)} interleaved runs, ratios within a round.",),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One process: when it was started, what it printed, how long it took, what the server's log says."""

    started: float
    said: bytes
    whole: float
    seen: str | None

    @property
    def first_query(self) -> float:
        """Seconds until the server saw the first query."""
        assert self.seen is not None, "no query reached the server"
        return float(self.seen) - self.started


def _run(stand: Stand, name: str, *arguments: str) -> _Run:
    log = stand.server.log_path
    begin = log.stat().st_size
    started = time.time()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=plain_environment() | {"DATABASE_URL": stand.dsn(name)},
        capture_output=True,
        check=False,
    )
    whole = time.time() - started
    if done.returncode != 0:
        raise RuntimeError(f"{arguments} ended with {done.returncode}: {done.stderr[-2000:]!r}")
    with log.open("rb") as text:
        text.seek(begin)
        seen = _SEEN.search(text.read().decode(errors="replace"))
    return _Run(started, done.stdout, whole, seen[1] if seen else None)
