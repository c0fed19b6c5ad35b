"""Indexes: the documents' set against `migrate --heartbeats=hot`.

An index on a column that every beat changes makes each beat write to all indexes. Measured: the time of a
beat, the share of HOT updates, the WAL it writes; and what the hot set costs in return, the idle scan.
"""

from __future__ import annotations

import time
from typing import Any

from bench.idle import SETS, survey
from bench.report import Result, middle
from bench.stand import Connection, Stand
from reconciler.migrate import Heartbeats
from reconciler.worker import Claim, Sdk, heartbeat_batch

FINISHED, LIVE = 1_000_000, 10_000
TOGETHER = (20, 500)
"""Jobs beaten by one statement: a small worker, whose beat is mostly the commit, and a large one."""

SDK = Sdk()


def measure(stand: Stand) -> Result:
    databases = {heartbeats: _database(stand, heartbeats) for heartbeats in SETS}
    # The first, uncounted round pays for the full page images; there is no other checkpoint.
    for name in databases.values():
        with stand.connect(name) as conn:
            conn.execute("CHECKPOINT")
    beats: dict[tuple[Heartbeats, int], dict[str, list[float]]] = {
        (heartbeats, jobs): {"ms": [], "hot": [], "wal": []} for heartbeats in SETS for jobs in TOGETHER
    }
    for warm in [True] + [False] * stand.times(9):
        for (heartbeats, jobs), kept in beats.items():
            with stand.connect(databases[heartbeats]) as conn:
                taken = _round(conn, _claims(conn), jobs)
                if not warm:
                    for key, value in taken.items():
                        kept[key].append(value)
                # What autovacuum does between two rounds of a fleet that beats every 15 seconds.
                conn.execute("VACUUM jobs")
    scans = {heartbeats: survey(stand, name).execution_ms for heartbeats, name in databases.items()}
    for name in databases.values():
        stand.drop(name)
    small, large = TOGETHER
    facts: dict[str, Any] = {
        heartbeats: {
            "beat_us": {
                str(jobs): round(middle(beats[heartbeats, jobs]["ms"]) * 1000, 1) for jobs in TOGETHER
            },
            "hot_share": round(middle(beats[heartbeats, large]["hot"]), 3),
            "wal_bytes_per_beat": round(middle(beats[heartbeats, large]["wal"])),
            "idle_scan_ms": round(scans[heartbeats], 3),
        }
        for heartbeats in SETS
    }
    facts["default_beat_of_hot"] = {
        str(jobs): round(
            middle(
                slow / fast
                for slow, fast in zip(beats["default", jobs]["ms"], beats["hot", jobs]["ms"], strict=True)
            ),
            2,
        )
        for jobs in TOGETHER
    }
    ratios = facts["default_beat_of_hot"]
    return Result(
        name="indexes",
        title=f"{stand.rows(LIVE) // 2:,} running and {stand.rows(FINISHED) // 2:,} finished jobs in a table",
        header=("indexes", f"beat µs, by {small}", f"by {large}", "HOT", "WAL bytes a beat", "idle scan ms"),
        rows=[
            (
                heartbeats,
                f"{facts[heartbeats]['beat_us'][str(small)]:.0f}",
                f"{facts[heartbeats]['beat_us'][str(large)]:.0f}",
                f"{facts[heartbeats]['hot_share']:.0%}",
                f"{facts[heartbeats]['wal_bytes_per_beat']:,}",
                f"{facts[heartbeats]['idle_scan_ms']:.2f}",
            )
            for heartbeats in SETS
        ],
        facts=facts,
        notes=(
            f"Beats of {small} and of {large} jobs in one statement; with the default indexes a beat",
            f"takes {ratios[str(small)]:.2f} and {ratios[str(large)]:.2f} times as long.",
        ),
    )


def _database(stand: Stand, heartbeats: Heartbeats) -> str:
    name = stand.migrated(heartbeats)
    stand.fill(name, "finished", stand.rows(FINISHED))
    stand.fill(name, "live", stand.rows(LIVE))
    stand.settle(name)
    return name


def _claims(conn: Connection) -> list[Claim]:
    rows = conn.execute(
        "SELECT id, locked_by, attempt_count, stage FROM jobs WHERE status = 'processing' ORDER BY locked_by"
    ).fetchall()
    return [
        Claim("jobs", job_id, worker, attempt, stage, lease_by_stage=True)
        for job_id, worker, attempt, stage in rows
    ]


def _round(conn: Connection, claims: list[Claim], together: int) -> dict[str, float]:
    """Beat every job once; per beat: milliseconds, share of HOT updates, bytes of WAL."""
    updates, hot, wal = _counters(conn)
    began = time.perf_counter()
    for first in range(0, len(claims), together):
        held = claims[first : first + together]
        beaten = heartbeat_batch(conn, held, sdk=SDK).beaten
        if len(beaten) != len(held):
            raise AssertionError(f"only {len(beaten)} of {len(held)} jobs were beaten")
    took = (time.perf_counter() - began) * 1000
    updates_after, hot_after, wal_after = _counters(conn)
    beaten_rows = updates_after - updates
    assert beaten_rows == len(claims)
    return {
        "ms": took / len(claims),
        "hot": (hot_after - hot) / beaten_rows,
        "wal": (wal_after - wal) / len(claims),
    }


def _counters(conn: Connection) -> tuple[int, int, int]:
    """(updates, HOT updates, WAL position) so far."""
    conn.execute("SELECT pg_stat_force_next_flush()" if conn.info.server_version >= 150000 else "SELECT 1")
    row = conn.execute(
        "SELECT n_tup_upd, n_tup_hot_upd, pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
        " FROM pg_stat_user_tables WHERE relname = 'jobs'"
    ).fetchone()
    assert row is not None
    return row[0], row[1], row[2]
