"""One peer's queue, emptied by its own worker. Runs in the private environment of bench/peers.txt.

    python worker_peers.py procrastinate|pgqueuer DSN JOBS CONCURRENCY

Prints one JSON line: how long it took from the start of the worker to the last call of its handler, which is
how our own worker is measured too: nobody's way of shutting down counts.
"""

# mypy: ignore-errors
# The peers live in an environment of their own; their types are not known here.
from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any


async def procrastinate(dsn: str, jobs: int, concurrency: int) -> dict[str, Any]:
    import procrastinate as peer

    connector = peer.PsycopgConnector(conninfo=dsn, max_size=max(4, min(concurrency, 10)))
    app = peer.App(connector=connector)
    done = 0
    ended = 0.0

    @app.task(name="nothing", queue="q")
    async def nothing() -> None:
        nonlocal done, ended
        done += 1
        ended = time.perf_counter()

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        deferrer = nothing.configure()
        for _ in range(0, jobs, 1000):
            await deferrer.batch_defer_async(*[{} for _ in range(min(1000, jobs))])
        began = time.perf_counter()
        await app.run_worker_async(
            queues=["q"], concurrency=concurrency, wait=False, install_signal_handlers=False
        )
    return {"done": done, "seconds": ended - began, "version": _version("procrastinate")}


async def pgqueuer(dsn: str, jobs: int, concurrency: int) -> dict[str, Any]:
    import psycopg
    from pgqueuer import PgQueuer
    from pgqueuer.types import QueueExecutionMode

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        queue = PgQueuer.from_psycopg_connection(conn)
        await queue.queries.install()
        done = 0
        ended = 0.0

        @queue.entrypoint("nothing")
        async def nothing(_: Any) -> None:
            nonlocal done, ended
            done += 1
            ended = time.perf_counter()

        for _ in range(0, jobs, 1000):
            size = min(1000, jobs)
            await queue.queries.enqueue(["nothing"] * size, [None] * size, [0] * size)
        began = time.perf_counter()
        await queue.run(
            batch_size=min(concurrency, 10),
            mode=QueueExecutionMode.drain,
            max_concurrent_tasks=max(concurrency, 2 * min(concurrency, 10)),
        )
    return {"done": done, "seconds": ended - began, "version": _version("pgqueuer")}


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def main() -> None:
    peer, dsn, jobs, concurrency = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    run = {"procrastinate": procrastinate, "pgqueuer": pgqueuer}[peer]
    print(json.dumps(asyncio.run(run(dsn, jobs, concurrency))))


if __name__ == "__main__":
    main()
