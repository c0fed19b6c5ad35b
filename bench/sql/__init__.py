"""The bench's own statements, read by the same loader rules as reconciler/sql."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from psycopg import sql

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


@cache
def _queries(file: str) -> dict[str, str]:
    parts = _NAME.split(files(__package__).joinpath(f"{file}.sql").read_text(encoding="utf-8"))[1:]
    return {name: body.strip().rstrip(";") for name, body in zip(parts[::2], parts[1::2], strict=True)}


def query(file: str, name: str, **names: str) -> sql.Composed:
    """One statement with its identifiers filled in."""
    text = sql.SQL(_queries(file)[name])
    return text.format(**{key: sql.Identifier(value) for key, value in names.items()})
