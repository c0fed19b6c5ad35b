"""The worker SDK in numbers: `python -m bench.worker [--scale 0.02] [--only NAME]`.

- claims: claims/s and finishes/s of the bare primitives at 1, 8 and 32 connections
- drain: whole jobs/s of the runtime with a handler that does nothing, beside procrastinate and pgqueuer
- beats: 10,000 jobs held by one worker: statements and time per round, HOT ratio, growth over an hour's beats
- cpu: a handler that burns a processor in pure Python for 60 s: the longest gap between beats
- contention: claim latency while 100 workers contend

One server for all, with Postgres' own durability. Numbers of a run belong together; a shared machine makes
them slow alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from bench.stand import ROOT, SETTINGS, Stand
from reconciler.demo.postgres import EmbeddedPostgres
from reconciler.worker import Claim, JobContext, Sdk, Worker, claim_next, finish_job, heartbeat_batch
from reconciler.worker import metrics as counted

Row = tuple[str, str]
CONCURRENCIES = (1, 8, 32)
PEERS = ROOT / ".tools" / "peers"
SDK = Sdk()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def queued(stand: Stand, jobs: int, heartbeats: str = "default") -> str:
    """A database with that many jobs in its queue."""
    name = stand.migrated(heartbeats)  # type: ignore[arg-type]
    with stand.connect(name) as conn:
        conn.execute(
            "insert into jobs (status, stage, expected_duration_ms)"
            " select 'queued', 'clip', 60000 from generate_series(1, %s)",
            (jobs,),
        )
    stand.settle(name)
    return name


def together(count: int, work: Callable[[int], None]) -> float:
    """Run `work` in that many threads at once; seconds from the common start to the last end."""
    barrier = threading.Barrier(count + 1)
    errors: list[BaseException] = []

    def one(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - began


# ── claims ──────────────────────────────────────────────────────────────────────────────────────────


def claims(stand: Stand) -> list[Row]:
    rows: list[Row] = []
    jobs = stand.rows(6000)
    for concurrency in CONCURRENCIES:
        name = queued(stand, jobs)
        conns = [psycopg.connect(stand.dsn(name), autocommit=True) for _ in range(concurrency)]
        held: list[list[Claim]] = [[] for _ in range(concurrency)]

        def claim(number: int, conns: Any = conns, held: Any = held) -> None:
            while found := claim_next(conns[number], "jobs", f"w{number}", sdk=SDK):
                held[number] += found

        def finish(number: int, conns: Any = conns, held: Any = held) -> None:
            for one in held[number]:
                finish_job(conns[number], one, success=True, sdk=SDK)

        claim_sec = together(concurrency, claim)
        finish_sec = together(concurrency, finish)
        for conn in conns:
            conn.close()
        stand.drop(name)
        rows.append(
            (
                f"{concurrency} connections",
                f"{jobs / claim_sec:,.0f} claims/s, {jobs / finish_sec:,.0f} finishes/s",
            )
        )
    name = queued(stand, jobs)
    with stand.connect(name) as conn:
        began = time.perf_counter()
        while claim_next(conn, "jobs", "w", limit=50, sdk=SDK):
            pass
        rows.append(("1 connection, 50 at once", f"{jobs / (time.perf_counter() - began):,.0f} claims/s"))
    stand.drop(name)
    return rows


# ── drain ───────────────────────────────────────────────────────────────────────────────────────────


def drain(stand: Stand) -> list[Row]:
    rows: list[Row] = []
    jobs = stand.rows(3000)
    peers = _peers()
    for concurrency in CONCURRENCIES:
        cells = [_ours(stand, jobs, concurrency)]
        cells += [
            _peer(stand, peer, jobs, concurrency) if peers is None else f"{peer}: {peers}"
            for peer in ("procrastinate", "pgqueuer")
        ]
        rows.append((f"{concurrency} at once", "; ".join(cells)))
    return rows


def _ours(stand: Stand, jobs: int, concurrency: int) -> str:
    name = queued(stand, jobs)
    done = subprocess.run(
        [sys.executable, "-m", "bench.worker", "--drain-one", stand.dsn(name), str(jobs), str(concurrency)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
    with stand.connect(name) as conn:
        row = conn.execute("select count(*) from jobs where status = 'done'").fetchone()
        assert row == (jobs,), row
    stand.drop(name)
    return f"job-reaper {jobs / seconds:,.0f}/s"


def drain_one(dsn: str, jobs: int, concurrency: int) -> None:
    """In a process of its own, like the peers: empty the queue, then say how long it took."""
    done = 0
    ended = 0.0

    async def nothing(_: JobContext) -> None:
        nonlocal done, ended
        done += 1
        ended = time.perf_counter()
        if done == jobs:
            worker.stop()

    worker = Worker(dsn, {"jobs": nothing}, concurrency=concurrency, sdk=SDK)
    began = time.perf_counter()
    worker.run()
    print(json.dumps({"seconds": ended - began, "done": done}))


def _peers() -> str | None:
    """Install the peers into an environment of their own; why not, when it cannot be done."""
    if (PEERS / "bin" / "python").exists():
        return None
    uv = next((path for path in (ROOT / ".tools/bin/uv", Path("/usr/local/bin/uv")) if path.exists()), "uv")
    try:
        subprocess.run([uv, "venv", "-q", PEERS, "--python", sys.executable], check=True, capture_output=True)
        subprocess.run(
            [uv, "pip", "install", "-q", "--python", PEERS / "bin/python", "-r", ROOT / "bench/peers.txt"],
            check=True, capture_output=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not installed ({type(error).__name__})"
    return None


def _peer(stand: Stand, peer: str, jobs: int, concurrency: int) -> str:
    name = stand.migrated()
    done = subprocess.run(
        [PEERS / "bin/python", ROOT / "bench/worker_peers.py", peer, stand.dsn(name), str(jobs),
         str(concurrency)],
        capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]}, timeout=600,
    )  # fmt: skip
    stand.drop(name)
    if done.returncode != 0:
        return f"{peer}: failed ({done.stderr.strip().splitlines()[-1][:80] if done.stderr else '?'})"
    answer = json.loads(done.stdout.splitlines()[-1])
    return f"{peer} {answer['version']} {answer['done'] / answer['seconds']:,.0f}/s"


# ── beats ───────────────────────────────────────────────────────────────────────────────────────────


def beats(stand: Stand) -> list[Row]:
    rows: list[Row] = []
    jobs = stand.rows(10_000)
    rounds = 240 if stand.scale >= 0.5 else 10  # an hour at one beat in 15 s
    for heartbeats in ("default", "hot"):
        name = queued(stand, jobs, heartbeats)
        with stand.connect(name) as conn:
            held: list[Claim] = []
            while found := claim_next(conn, "jobs", "w", limit=1000, sdk=SDK):
                held += found
            conn.execute("vacuum (analyze) jobs")
            before = _table(conn)
            times = []
            for number in range(rounds):
                began = time.perf_counter()
                answer = heartbeat_batch(conn, held, sdk=SDK)
                times.append(time.perf_counter() - began)
                assert len(answer.beaten) == jobs, (len(answer.busy), len(answer.lost))
                if number % 20 == 19:  # what autovacuum does every few minutes
                    conn.execute("vacuum jobs")
            conn.execute("select pg_stat_force_next_flush()")
            after = _table(conn)
        stand.drop(name)
        hot = (after[1] - before[1]) / (after[0] - before[0])
        rows.append(
            (
                f"{jobs:,} jobs, index set {heartbeats}",
                f"1 statement a round, median {statistics.median(times) * 1000:,.0f} ms, "
                f"p95 {percentile(times, 0.95) * 1000:,.0f} ms; HOT {hot:.1%}; heap {_mb(before[2])} -> "
                f"{_mb(after[2])}, indexes {_mb(before[3])} -> {_mb(after[3])} after {rounds} rounds",
            )
        )
    return rows


def _table(conn: psycopg.Connection[Any]) -> tuple[int, int, int, int]:
    row = conn.execute(
        "select n_tup_upd, n_tup_hot_upd, pg_table_size('jobs'), pg_indexes_size('jobs')"
        " from pg_stat_user_tables where relname = 'jobs'"
    ).fetchone()
    assert row is not None
    updated, hot, heap, indexes = row
    return updated, hot, heap, indexes


def _mb(size: int) -> str:
    return f"{size / 2**20:.1f} MB"


# ── cpu ─────────────────────────────────────────────────────────────────────────────────────────────


def cpu(stand: Stand) -> list[Row]:
    seconds = 60 if stand.scale >= 0.5 else 6
    rows: list[Row] = []
    for where in ("thread", "process"):
        for kind in ("plain", "async"):
            name = queued(stand, 1)
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.worker", "--burn", stand.dsn(name), where, kind, str(seconds)],
                cwd=ROOT, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            gaps, seen = [0.0], set()
            with stand.connect(name) as conn:
                while process.poll() is None:
                    row = conn.execute(
                        "select last_heartbeat_at,"
                        " extract(epoch from clock_timestamp() - last_heartbeat_at)::float8"
                        " from jobs where status = 'processing'"
                    ).fetchone()
                    if row is not None:
                        seen.add(row[0])
                        gaps.append(row[1])
                    time.sleep(0.05)
            process.communicate()
            stand.drop(name)
            rows.append(
                (
                    f"{kind} handler, beats from a {where}",
                    f"{len(seen)} beats in {seconds} s, longest gap {max(gaps):.1f} s",
                )
            )
    return rows


def burn(dsn: str, where: Any, kind: str, seconds: float) -> None:
    def plain(_: JobContext) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sum(range(1000))
        worker.stop()

    async def on_loop(job: JobContext) -> None:
        plain(job)

    worker = Worker(dsn, {"jobs": plain if kind == "plain" else on_loop}, heartbeat=where, sdk=SDK)
    worker.run()
    print(counted.HEARTBEATS.value())


# ── contention ──────────────────────────────────────────────────────────────────────────────────────


def contention(stand: Stand) -> list[Row]:
    workers, processes = 100, 4
    jobs = stand.rows(10_000)
    name = queued(stand, jobs)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.worker", "--contend", stand.dsn(name), str(workers // processes)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(processes)
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()  # all connected
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    latencies: list[float] = []
    for process in started:
        latencies += json.loads(process.communicate()[0].splitlines()[-1])
    stand.drop(name)
    assert len(latencies) >= jobs
    return [
        (
            f"{workers} workers, {jobs:,} jobs",
            f"median {statistics.median(latencies) * 1000:.1f} ms, "
            f"p95 {percentile(latencies, 0.95) * 1000:.1f} ms, "
            f"p99 {percentile(latencies, 0.99) * 1000:.1f} ms, worst {max(latencies) * 1000:.0f} ms",
        )
    ]


def contend(dsn: str, workers: int) -> None:
    conns = [psycopg.connect(dsn, autocommit=True) for _ in range(workers)]
    print("ready", flush=True)
    sys.stdin.readline()
    taken: list[float] = []

    def work(number: int) -> None:
        while True:
            began = time.perf_counter()
            found = claim_next(conns[number], "jobs", f"w{os.getpid()}-{number}", sdk=SDK)
            taken.append(time.perf_counter() - began)
            if not found:
                return

    together(workers, work)
    print(json.dumps(taken))


PARTS: dict[str, Callable[[Stand], list[Row]]] = {
    "claims": claims, "drain": drain, "beats": beats, "cpu": cpu, "contention": contention,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.worker")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--drain-one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--burn", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--contend", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drain_one:
        drain_one(given.drain_one[0], int(given.drain_one[1]), int(given.drain_one[2]))
    elif given.burn:
        burn(given.burn[0], given.burn[1], given.burn[2], float(given.burn[3]))
    elif given.contend:
        contend(given.contend[0], int(given.contend[1]))
    else:
        show(given.scale, given.only or list(PARTS))


def show(scale: float, parts: list[str]) -> None:
    results: dict[str, list[Row]] = {}
    with EmbeddedPostgres(durable=True, settings=SETTINGS | {"max_connections": "200"}) as server:
        stand = Stand(server, scale)
        print(f"Postgres {stand.version()}, {os.cpu_count()} processors, scale {scale}\n")
        for part in parts:
            print(f"## {part}\n")
            results[part] = PARTS[part](stand)
            for name, value in results[part]:
                print(f"| {name} | {value} |")
            print(flush=True)
        stand.close()
    target = ROOT / "bench" / "results" / "worker.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"scale": scale, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
