"""Whatever is given: a ConfigError with its problems, or settings that are whole and load again."""

from __future__ import annotations

import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from reconciler.config import Settings, describe, document, load
from reconciler.config.environment import variables
from reconciler.config.grammar import TEN_YEARS_SEC, Choice, Factor, Flag, Ladder, Number, Patterns, Whole
from reconciler.config.setting import Setting, dotted, walk
from reconciler.errors import ConfigError

MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = sorted({*variables(), "REAPER_TABLES", "REAPER_LIVENES", "DUB_SLA_FACTOR", "CLIP_SLA_FACTOR", "PATH"})
KEYS = [path for path, _, _ in walk(Settings)]
WORDS = sorted({part for path in KEYS for part in path} | {"jobs", "a.b", "dub", "OOMKilled", "", "<<"})

texts = st.one_of(
    st.text(),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["true", "off", "auto", "1,2", "jobs,asr_jobs", "postgresql://u:p@h/d", "60s", "\udcff"]),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts)
words = st.sampled_from(WORDS) | st.text()
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=5),
)


def outcome(**given_: Any) -> Settings | ConfigError:
    """Settings or ConfigError; anything else is a defect and propagates."""
    try:
        loaded = load(**given_)
    except ConfigError as caught:
        error = caught
    else:
        return whole(loaded)
    assert error.problems
    assert all(problem.key and problem.allowed and problem.source for problem in error.problems)
    assert all(str(problem).isprintable() for problem in error.problems)
    return error


def whole(loaded: Settings) -> Settings:
    """The settings, after a look at all that can be asked of them."""
    assert all(row["source"] for row in describe(loaded))
    loaded.policy()
    assert loaded.table_specs()
    return loaded


@MANY
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(), texts, max_size=6))
def test_no_environment_raises_anything_but_a_config_error(env: dict[str, str]) -> None:
    env.pop("REAPER_CONFIG", None)
    outcome(env=env)


@MANY
@given(st.dictionaries(st.sampled_from([dotted(path) for path in KEYS]) | st.text(), trees, max_size=6))
def test_no_flags_raise_anything_but_a_config_error(overrides: dict[str, object]) -> None:
    outcome(env={}, overrides=overrides)


@MANY
@given(st.binary(max_size=60) | st.text(alphabet="ab:-[]{}&*!#|>'\"%@,? \n\t0.~<").map(str.encode))
def test_no_bytes_raise_anything_but_a_config_error(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.yaml"
        path.write_bytes(raw)
        outcome(env={}, path=str(path))


@MANY
@given(st.dictionaries(st.sampled_from(WORDS), trees, max_size=5))
def test_no_document_raises_anything_but_a_config_error(tree: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        outcome(env={}, path=str(path))


def right_values(setting: Setting) -> st.SearchStrategy[object]:
    """Values the key allows, spelt as a file would."""
    grammar = setting.grammar
    match grammar:
        case Whole():
            return st.integers(grammar.least, grammar.most)
        case Number():
            return st.decimals(grammar.least, grammar.most, places=6).map(str)
        case Factor():
            return st.decimals(Decimal("0.000001"), 10_000, places=6).map(str)
        case Flag():
            return st.booleans() | st.sampled_from(["yes", "off"])
        case Choice():
            return st.sampled_from(grammar.words)
        case Ladder():
            return st.lists(st.integers(1, TEN_YEARS_SEC), min_size=1, max_size=20).map(sorted)
        case Patterns():
            return st.lists(st.sampled_from(["{pod}", "a-{pod}", "{cluster}/{pod}"]), min_size=1, unique=True)
        case _:
            return st.from_regex(r"[a-z]{1,20}", fullmatch=True).filter(lambda word: word not in ("null",))


@st.composite
def right_trees(draw: st.DrawFn) -> dict[str, Any]:
    """A file in which each value is allowed by itself; rules over several keys may still refuse it."""
    tree: dict[str, Any] = {}
    chosen = draw(
        st.lists(st.sampled_from(list(walk(Settings))), unique_by=lambda entry: entry[0], max_size=12)
    )
    for path, _, setting in chosen:
        if not setting.in_file or path == ("metrics", "pushgateway"):
            continue
        here = tree
        parts = [
            draw(st.sampled_from(["jobs", "a.b", "Ünï x", "null", "off", "1"])) if part == "<name>" else part
            for part in path
        ]
        for part in parts[:-1]:
            here = here.setdefault(part, {})
        here[parts[-1]] = draw(right_values(setting))
    for cause_or_stage in tree.get("stages", {}).values():
        cause_or_stage.setdefault("factor", 1)
    return tree


@MANY
@given(right_trees(), st.sampled_from(["", "jobs", "a.b,jobs,new"]))
def test_what_was_loaded_loads_again_from_its_own_document(tree: dict[str, Any], tables: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.yaml"
        path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
        first = outcome(env={"REAPER_TABLES": tables}, path=str(path))
        assume(isinstance(first, Settings))
        assert isinstance(first, Settings)
        path.write_text(yaml.safe_dump(document(first), sort_keys=False), encoding="utf-8")
        second = load(env={}, path=str(path))
        assert second.policy() == first.policy()
        assert second.table_specs() == first.table_specs()
        assert second.checksum == first.checksum
        assert [(row["key"], row["value"]) for row in describe(second)] == [
            (row["key"], row["value"]) for row in describe(first)
        ]
        assert second.warnings == first.warnings


@MANY
@given(st.data())
def test_a_value_that_is_allowed_arrives_and_names_its_source(data: st.DataObject) -> None:
    path, _, setting = data.draw(
        st.sampled_from([entry for entry in walk(Settings) if "<name>" not in entry[0]])
    )
    assume(setting.in_file and path != ("metrics", "pushgateway"))
    value = data.draw(right_values(setting))
    loaded = outcome(env={}, overrides={dotted(path): value})
    assume(isinstance(loaded, Settings))
    assert isinstance(loaded, Settings)
    assert loaded.sources[dotted(path)] == "flag"
    shown = next(row["value"] for row in describe(loaded) if row["key"] == dotted(path))
    assert setting.parse(shown) == setting.parse(value)
