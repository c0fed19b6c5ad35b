"""The bench itself, at a size where its times mean nothing: it runs to the end, compares what it claims to
compare, and reports every field. No number is judged here: a busy machine is not a bug."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import rescue
from bench.__main__ import MEASUREMENTS
from bench.stand import ROOT, Stand
from tests.postgres import Server

SCALE = 0.002


@pytest.fixture
def stand(pg_server: Server) -> Iterator[Stand]:
    stand = Stand(pg_server.postgres, SCALE)
    yield stand
    stand.close()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every measurement of `python -m bench`, run once."""
    directory = tmp_path_factory.mktemp("bench")
    done = subprocess.run(
        [sys.executable, "-m", "bench", *MEASUREMENTS],
        cwd=ROOT,
        env={**os.environ, "BENCH_SCALE": str(SCALE), "BENCH_RESULTS": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}
    return {**found, "printed": done.stdout}


def test_every_measurement_is_printed_and_written(results: dict[str, Any]) -> None:
    for name in MEASUREMENTS:
        result = results[name]
        assert f"## {name}: " in results["printed"]
        assert result["rows"]
        assert all(len(row) == len(result["header"]) for row in result["rows"])
        assert {"postgres", "python", "processors", "scale", "at", "load", "load_after"} <= result[
            "where"
        ].keys()
        assert str(Path.home()) not in json.dumps(result)


def test_every_side_of_the_rescue_is_timed_and_all_wrote_every_row(results: dict[str, Any]) -> None:
    facts = results["rescue"]["facts"]
    assert list(facts["sides"]) == list(rescue.SIDES)
    for numbers in facts["sides"].values():
        assert numbers["rows_per_sec"] > 0
        assert 0 < numbers["lowest"] <= numbers["of_floor"] <= numbers["highest"]
        assert len(numbers["seconds"]) == 2
    assert facts["sides"]["floor"]["of_floor"] == 1
    half = facts["expired_rows"] // 2
    assert facts["writes"] == {table: [half // 2, half // 2, half] for table in ("jobs", "asr_jobs")}, (
        "per table: half queued, half failed, an event each"
    )


def test_the_other_measurements_report_their_fields(results: dict[str, Any]) -> None:
    assert list(results["batches"]["facts"]["sizes"]) == ["floor", "1,000", "5,000", "10,000"]
    idle = results["idle"]["facts"]
    assert [one["indexes"] for one in idle["passes"]] == ["default"] * 3 + ["hot"] * 3
    assert all(one["pass_ms"] > 0 and one["survey_ms"] > 0 for one in idle["passes"])
    assert all(idle["plans"][heartbeats] for heartbeats in ("default", "hot"))
    memory = results["memory"]["facts"]
    assert 5 < memory["python_psycopg_mib"] < memory["idle_mib"] <= memory["full_mib"] * 1.1
    starts = results["coldstart"]["facts"]["sides"]
    assert starts["job-reaper once, first query"]["ms"] < starts["job-reaper once, whole"]["ms"]
    indexes = results["indexes"]["facts"]
    assert indexes["default"]["hot_share"] == 0, "an index on a beaten column makes HOT impossible"
    assert indexes["hot"]["hot_share"] > 0.5
    assert indexes["default"]["wal_bytes_per_beat"] > indexes["hot"]["wal_bytes_per_beat"]


def test_a_side_that_writes_something_else_is_found_out(stand: Stand) -> None:
    template = rescue.prepared(stand, 20, 40)

    def forgets_one_cause(stand: Stand, name: str) -> None:
        rescue.floor(stand, name)
        with stand.connect(name) as conn:
            conn.execute(
                "UPDATE jobs SET fail_reason = NULL"
                " WHERE id = (SELECT id FROM jobs WHERE status = 'failed' LIMIT 1)"
            )

    def forgets_one_event(stand: Stand, name: str) -> None:
        rescue.floor(stand, name)
        with stand.connect(name) as conn:
            conn.execute("DELETE FROM job_events WHERE id = (SELECT max(id) FROM job_events)")

    for side in (forgets_one_cause, forgets_one_event):
        with pytest.raises(AssertionError, match="odd side wrote"):
            rescue.interleaved(stand, template, {rescue.FLOOR: rescue.floor, "odd side": side}, 1)
    stand.drop(template)


def test_an_unknown_measurement_or_scale_is_refused() -> None:
    for arguments, env, said in (
        (["rescu"], {}, "allowed: rescue, batches"),
        (["rescue"], {"BENCH_SCALE": "much"}, "BENCH_SCALE=much: a number above 0"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "bench", *arguments],
            cwd=ROOT,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert said in done.stderr
