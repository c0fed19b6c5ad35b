"""Named queries, kept as .sql files that can be pasted into psql.

A file holds queries that start with `-- name: word`; the comment below the name says why. `{placeholders}`
are filled by psycopg.sql (identifiers are always quoted by the driver), `%(parameters)s` by the server.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from psycopg import sql

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


@cache
def queries(file: str) -> dict[str, str]:
    """All queries of `<file>.sql`, by name, without their comments: Postgres logs stay short."""
    text = files(__package__).joinpath(f"{file}.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)[1:]
    return {name: _strip(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def query(file: str, name: str) -> sql.SQL:
    """One query, ready for `.format(table=Identifier(...))`."""
    return trusted(queries(file)[name])


def trusted(text: str) -> sql.SQL:
    """SQL text that comes from this package or from the catalogue's own quoting, never from a user."""
    return sql.SQL(text)


def escaped(part: sql.Composable) -> sql.SQL:
    """A quoted name whose own percent signs are not placeholders: psycopg quotes, but leaves those."""
    return trusted(part.as_string(None).replace("%", "%%"))


def _strip(body: str) -> str:
    lines = (line.split("--", 1)[0].rstrip() for line in body.splitlines())
    return "\n".join(line for line in lines if line).rstrip(";")
