"""Named queries: every one can be loaded, none is lost, and stripping comments never cuts a query."""

from __future__ import annotations

import re
from collections import Counter
from importlib.resources import files

import pytest
from psycopg import sql

from reconciler.sql import escaped, queries, query, trusted

FILES = sorted(
    entry.name.removesuffix(".sql")
    for entry in files("reconciler.sql").iterdir()
    if entry.name.endswith(".sql")
)


def source(file: str) -> str:
    return files("reconciler.sql").joinpath(f"{file}.sql").read_text(encoding="utf-8")


def test_there_are_query_files() -> None:
    assert {"reap", "state", "describe", "worker"} <= set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_no_name_is_given_twice_in_a_file(file: str) -> None:
    names = re.findall(r"^-- name: (.*)$", source(file), re.MULTILINE)
    assert [name for name, n in Counter(names).items() if n > 1] == []
    assert list(queries(file)) == names  # a name with a typo would be a comment, its query part of another


@pytest.mark.parametrize("file", FILES)
def test_every_query_has_a_body_without_comments(file: str) -> None:
    for name, body in queries(file).items():
        assert body.strip(), f"{file}.{name} is empty"
        assert "--" not in body, f"{file}.{name} keeps a comment"
        assert not body.endswith(";"), f"{file}.{name} ends in a semicolon"


@pytest.mark.parametrize("file", FILES)
def test_no_string_holds_two_dashes(file: str) -> None:
    """Comments are cut at the first two dashes of a line: inside a string that would cut the query."""
    for line in source(file).splitlines():
        code = line.split("--", 1)[0]
        assert code.count("'") % 2 == 0, line


@pytest.mark.parametrize("file", FILES)
def test_brackets_balance_in_every_query(file: str) -> None:
    for name, body in queries(file).items():
        bare = re.sub(r"'[^']*'", "", body)
        assert bare.count("(") == bare.count(")"), f"{file}.{name}"


@pytest.mark.parametrize("file", FILES)
def test_every_percent_sign_is_a_parameter_or_doubled(file: str) -> None:
    for name, body in queries(file).items():
        left = re.sub(r"%\(\w+\)s|%%|%s", "", body)
        assert "%" not in left, f"{file}.{name}"


def test_a_query_is_composable_and_its_names_are_quoted_by_the_driver() -> None:
    made = query("reap", "processing_count").format(
        table=sql.Identifier('jobs"; drop table jobs; --'),
        status=sql.Identifier("status"),
        processing=sql.Literal("it's"),
    )
    assert made.as_string(None) == (
        'SELECT count(*) FROM "jobs""; drop table jobs; --" WHERE "status" = ' + "'it''s'"
    )


def test_an_unknown_query_is_an_error() -> None:
    with pytest.raises(KeyError):
        query("reap", "no such query")


def test_an_unknown_file_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        queries("no_such_file")


@pytest.mark.parametrize(
    ("name", "text"),
    [("jobs", '"jobs"'), ("100%", '"100%%"'), ("%s", '"%%s"'), ("%(x)s", '"%%(x)s"'), ('a"%', '"a""%%"')],
)
def test_percent_signs_in_names_are_not_placeholders(name: str, text: str) -> None:
    assert escaped(sql.Identifier(name)).as_string(None) == text


def test_trusted_text_may_hold_placeholders() -> None:
    assert trusted("SELECT {x}").format(x=sql.Literal(1)).as_string(None) == "SELECT 1"
