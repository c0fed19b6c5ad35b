"""Cold start: from the start of `job-reaper once` to the first query that reaches the server.

A CronJob starts every minute, so this is paid every minute. The server's log says when the query came; it
and we read the same clock of the same machine. The yardstick is `python -c "import psycopg"`, from start to
exit; a bare connect and query in Python is shown beside it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

from bench.report import Result, middle
from bench.stand import ROOT, Stand, plain_environment

_SEEN = re.compile(r"^(\d+\.\d+) seen .*?(?:statement|execute [^:]*): (?!BEGIN)", re.MULTILINE)
_BARE = "import os, psycopg; psycopg.connect(os.environ['DATABASE_URL']).execute('select 1')"


def measure(stand: Stand) -> Result:
    name = stand.migrated()
    for setting in ("log_statement = 'all'", "log_min_messages = 'log'"):
        stand.alter(name, setting)
    taken: dict[str, list[float]] = {
        'python -c "import psycopg"': [],
        "python, psycopg, first query": [],
        "job-reaper once, first query": [],
        "job-reaper once, whole": [],
    }
    yardstick, bare, first, whole = taken
    for warm in [True] * 2 + [False] * stand.times(21):
        import_only, _ = _run(stand, name, "-c", "import psycopg")
        _, bare_query = _run(stand, name, "-c", _BARE)
        once, once_query = _run(stand, name, "-m", "reconciler", "once", "--output", "json")
        if warm:
            continue
        assert bare_query is not None
        assert once_query is not None
        taken[yardstick].append(import_only)
        taken[bare].append(bare_query)
        taken[first].append(once_query)
        taken[whole].append(once)
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


def _run(stand: Stand, name: str, *arguments: str) -> tuple[float, float | None]:
    """Seconds until the process had ended, and until the server saw its first query."""
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
    ended = time.time()
    if done.returncode != 0:
        raise RuntimeError(f"{arguments} ended with {done.returncode}: {done.stderr[-2000:]!r}")
    with log.open("rb") as text:
        text.seek(begin)
        seen = _SEEN.search(text.read().decode(errors="replace"))
    return ended - started, float(seen[1]) - started if seen else None
