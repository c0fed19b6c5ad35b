"""The migration files: found in the repository or in the wheel, split into named statements, summed.

A file holds statements that start with `-- name: word`. `{placeholders}` are filled by psycopg.sql, so
that identifiers and words are quoted by the driver.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from psycopg import sql

from reconciler.errors import MigrationError
from reconciler.sql import trusted

_FILE = re.compile(r"^\d{3}_\w+\.sql$")
_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Migration:
    """One file. `checksum` ignores comments and blank space: a better explanation is not another schema."""

    name: str
    statements: Mapping[str, str]
    checksum: str

    def statement(self, name: str, /, **values: sql.Composable) -> sql.Composed:
        return trusted(self.statements[name]).format(**values)


def directory() -> Traversable:
    """Where the files are: inside the installed package, else at the top of the source tree."""
    packaged = files("reconciler").joinpath("migrations")
    if packaged.is_dir():
        return packaged
    source = Path(__file__).resolve().parent.parent / "migrations"
    if source.is_dir():
        return source
    raise MigrationError(
        f"the migration files are neither in {packaged} nor in {source}; install job-reaper again",
        code="missing_files",
    )


@cache
def migrations() -> Mapping[str, Migration]:
    """All numbered files, in order, by name without `.sql`."""
    found = sorted((item for item in directory().iterdir() if _FILE.match(item.name)), key=lambda i: i.name)
    return {m.name: m for m in (parse(i.name, i.read_text(encoding="utf-8")) for i in found)}


def parse(file_name: str, text: str) -> Migration:
    """Split one file into its statements and sum what remains of them without comments."""
    parts = _NAME.split(text)[1:]
    statements = {name: _bare(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}
    if not statements or not all(statements.values()):
        raise MigrationError(f"{file_name} needs one statement below each `-- name: word`", code="bad_file")
    tokens = "\n".join(f"{name}: {' '.join(body.split())}" for name, body in statements.items())
    return Migration(
        name=file_name.removesuffix(".sql"),
        statements=statements,
        checksum=hashlib.sha256(tokens.encode()).hexdigest(),
    )


def _bare(body: str) -> str:
    lines = (line.split("--", 1)[0].rstrip() for line in body.splitlines())
    return "\n".join(line for line in lines if line).rstrip(";")
