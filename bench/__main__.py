"""`python -m bench [NAME…]`: measure, print a table, write NAME.json into bench/results (or BENCH_RESULTS).

Without names: everything. BENCH_SCALE (default 1) scales the numbers of rows; below 0.1 there are only two
repetitions, which is for tests of the bench itself. --publish writes bench/numbers.json and the tables in
docs/reference/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace

from bench.report import Result, keep, publish, shown, where
from bench.stand import ROOT, SETTINGS, Stand
from reconciler.demo.postgres import EmbeddedPostgres

MEASUREMENTS = ("rescue", "batches", "idle", "memory", "coldstart", "indexes")
OF_THE_WORKER = "worker"
"""Measured by a program of its own, which starts its own server."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*MEASUREMENTS, OF_THE_WORKER)))
    parser.add_argument("--publish", action="store_true", help="make these the documented numbers")
    arguments = parser.parse_args()
    allowed = (*MEASUREMENTS, OF_THE_WORKER)
    unknown = [name for name in arguments.names if name not in allowed]
    if unknown:
        parser.error(f"unknown measurement {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    scale = _scale(parser)
    names = arguments.names or list(allowed)
    # An embedded reaper's lines go nowhere; those of the real command are written, and paid for.
    logging.getLogger("job_reaper").setLevel(logging.CRITICAL)
    ours = [name for name in names if name in MEASUREMENTS]
    if ours:
        _measure(ours, scale, documented=arguments.publish)
    if OF_THE_WORKER in names:
        command = [sys.executable, "-m", "bench.worker", "--scale", str(scale)]
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0


def _measure(names: list[str], scale: float, *, documented: bool) -> None:
    with EmbeddedPostgres(durable=True, settings=SETTINGS) as server:
        stand = Stand(server, scale)
        circumstances = where(stand.version(), scale)
        print(", ".join(f"{key} {value}" for key, value in circumstances.items()), "\n", flush=True)
        for name in names:
            began = time.monotonic()
            before = where(stand.version(), scale)
            result: Result = importlib.import_module(f"bench.{name}").measure(stand)
            result = replace(result, where=before | {"load_after": round(os.getloadavg()[0], 1)})
            print(shown(result), flush=True)
            print(f"{time.monotonic() - began:.0f} s; written to {keep(result).name}\n", flush=True)
            if documented:
                publish(result)
        stand.close()


def _scale(parser: argparse.ArgumentParser) -> float:
    given = os.environ.get("BENCH_SCALE", "1")
    try:
        scale = float(given)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 10:
        parser.error(f"BENCH_SCALE={given}: a number above 0, at most 10, e.g. 0.01")
    return scale


if __name__ == "__main__":
    sys.exit(main())
