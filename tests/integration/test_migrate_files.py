"""The migration files themselves: linted, explained, and inside the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from reconciler.errors import MigrationError
from reconciler.migrate import Heartbeats, migrate
from reconciler.migrate_files import directory, migrations, parse
from reconciler.migrate_session import same_backend
from tests.ci import cannot_run
from tests.integration.test_migrate_existing import JOBS, PARTITIONED
from tests.postgres import Connection

ROOT = Path(__file__).parents[2]

EXCLUDED = {
    "prefer-bigint-over-int": "attempts and milliseconds: the documents say INT, and claims saturate",
    "require-concurrent-index-creation": "job_events is new in the same transaction; ON ONLY scans nothing",
    "prefer-robust-stmts": "SET (fillfactor) and ATTACH run again are no-ops, and each runs in a transaction",
}


def rendered(dsn: str) -> str:
    """Every statement for the default tables: fresh, to the other index set, and back."""
    script: list[str] = []
    choices: list[Heartbeats | None] = [None, "hot", "default"]
    for heartbeats in choices:
        script += migrate(dsn, heartbeats=heartbeats, dry_run=True).sql
        migrate(dsn, heartbeats=heartbeats)
    return "\n".join(script) + "\n"


def squawk(script: str, path: Path, *excluded: str) -> subprocess.CompletedProcess[str]:
    path.write_text(script)
    command = [
        str(Path(sys.executable).with_name("squawk")),
        "--pg-version=13.0",
        *(f"--exclude={r}" for r in excluded),
    ]
    return subprocess.run([*command, str(path)], check=False, capture_output=True, text=True, timeout=60)


def test_squawk_finds_nothing_but_what_is_excluded_with_a_reason(empty_dsn: str, tmp_path: Path) -> None:
    script = rendered(empty_dsn)
    assert script.count("CREATE INDEX CONCURRENTLY") == 12
    result = squawk(script, tmp_path / "all.sql", *EXCLUDED)
    assert result.returncode == 0, result.stdout


def test_squawk_would_find_an_index_that_blocks_writers(empty_dsn: str, tmp_path: Path) -> None:
    harmful = rendered(empty_dsn).replace(" CONCURRENTLY", "")
    result = squawk(harmful, tmp_path / "harmful.sql", "prefer-bigint-over-int", "prefer-robust-stmts")
    assert result.returncode != 0
    assert "require-concurrent-index-creation" in result.stdout


def test_squawk_passes_the_statements_for_partitions(empty_dsn: str, tmp_path: Path) -> None:
    import psycopg

    with psycopg.connect(empty_dsn, autocommit=True) as app:
        app.execute(PARTITIONED)
    script = "\n".join(migrate(empty_dsn, JOBS, dry_run=True).sql)
    assert "ON ONLY" in script
    result = squawk(script, tmp_path / "partitions.sql", *EXCLUDED)
    assert result.returncode == 0, result.stdout


def test_each_file_says_which_lock_it_takes_and_is_numbered_without_gap() -> None:
    names = sorted(item.name for item in directory().iterdir() if re.match(r"\d", item.name))
    assert [int(name[:3]) for name in names] == list(range(1, len(names) + 1))
    assert [f"{name}.sql" for name in migrations()] == names
    for name in names:
        assert "Lock: " in directory().joinpath(name).read_text(encoding="utf-8"), name


def test_each_statement_is_a_single_one() -> None:
    for migration in migrations().values():
        for name, text in migration.statements.items():
            assert ";" not in text, f"{migration.name}: {name}"


def test_a_file_without_a_named_statement_is_refused() -> None:
    with pytest.raises(MigrationError, match="one statement below each"):
        parse("012_x.sql", "SELECT 1;")


def test_another_backend_in_the_middle_of_a_run_is_noticed(conn: Connection) -> None:
    same_backend(conn, conn.info.backend_pid)
    with pytest.raises(MigrationError, match="transaction mode"):
        same_backend(conn, conn.info.backend_pid + 1)


def test_the_wheel_carries_the_migrations_and_finds_them_there(tmp_path: Path) -> None:
    uv = shutil.which("uv", path=f"{ROOT / '.tools' / 'bin'}:{os.environ['PATH']}")
    if uv is None:
        cannot_run("uv is not installed: run scripts/setup")
    command = [uv, "build", "--wheel", "--out-dir", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {
            name.removeprefix("reconciler/migrations/")
            for name in archive.namelist()
            if "migrations/" in name
        }
        archive.extractall(tmp_path / "site")
    assert inside == {path.name for path in (ROOT / "migrations").glob("*.sql")}

    look = "from reconciler import migrate_files as f; print(f.directory(), len(f.migrations()))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", look],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / "site/reconciler/migrations"), str(len(migrations()))]
