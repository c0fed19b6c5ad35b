"""Memory: what one `once` needs at most, idle and with a million expired rows.

The process reads its own high-water mark as its last act. What the kernel tells a parent (wait4) will not
do: it counts the moment between fork and exec, when the child was still a copy of us.
"""

from __future__ import annotations

import subprocess
import sys

from bench.report import Result
from bench.stand import ROOT, Stand, plain_environment

EXPIRED = 1_000_000
MIB = 1024.0

_ONCE = """
import sys
from reconciler.cli import run
code = run(["once", "--output", "json"])
status = open("/proc/self/status").read()
print([line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")][0], file=sys.stderr)
sys.exit(code)
"""


def measure(stand: Stand) -> Result:
    name = stand.migrated()
    stand.settle(name)
    idle = _peak_mib(stand, name)
    expired = stand.rows(EXPIRED)
    stand.fill(name, "expired", expired)
    stand.settle(name)
    full = _peak_mib(stand, name)
    stand.drop(name)
    facts = {
        "expired_rows": expired,
        "idle_mib": round(idle, 1),
        "full_mib": round(full, 1),
        "python_psycopg_mib": round(_peak_of("import psycopg", {}), 1),
    }
    return Result(
        name="memory",
        title="largest resident set of one job-reaper once",
        header=("process", "MiB", "at most"),
        rows=[
            ('python -c "import psycopg"', f"{facts['python_psycopg_mib']:.1f}", ""),
            ("once, nothing expired", f"{idle:.1f}", "60"),
            (f"once, {expired:,} rows rescued", f"{full:.1f}", "100"),
        ],
        facts=facts,
    )


def _peak_mib(stand: Stand, name: str) -> float:
    return _peak_of(_ONCE, {"DATABASE_URL": stand.dsn(name)})


def _peak_of(program: str, env: dict[str, str]) -> float:
    if program != _ONCE:
        program += "\nimport sys\nstatus = open('/proc/self/status').read()\n"
        program += "print(status.split('VmHWM:')[1].split()[0], file=sys.stderr)\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=plain_environment() | env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"ended with {done.returncode}: {done.stderr[-2000:]}")
    return int(done.stderr.split()[-1]) / MIB
