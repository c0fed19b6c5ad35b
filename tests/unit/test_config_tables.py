"""Which tables are reaped, where they live, and that no two of them are one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from reconciler import model
from reconciler.config import load
from reconciler.config.tables import ColumnNames, EventsTable, StatusWords
from reconciler.errors import ConfigError, Problem


def a_file(directory: Path, text: str) -> str:
    path = directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def places(env: dict[str, str], path: str | None = None) -> list[tuple[str, str | None, str]]:
    return [(spec.name, spec.schema, spec.table) for spec in load(env=env, path=path).table_specs()]


def problems_of(env: dict[str, str], path: str | None = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(env=env, path=path)
    return caught.value.problems


def test_the_sections_know_every_name_of_the_model() -> None:
    assert ColumnNames().model_dump() == {field.name: field.default for field in fields(model.Columns)}
    assert StatusWords().model_dump() == {field.name: field.default for field in fields(model.Statuses)}
    assert {name.removesuffix("_name") for name in EventsTable.model_fields} == {
        field.name for field in fields(model.EventsSpec)
    }


def test_the_files_tables_replace_the_default_ones_in_the_files_order(tmp_path: Path) -> None:
    path = a_file(tmp_path, "tables: {z_jobs: , a_jobs: {}}")
    assert places({}, path) == [("z_jobs", None, "z_jobs"), ("a_jobs", None, "a_jobs")]


def test_reaper_tables_selects_orders_and_adds(tmp_path: Path) -> None:
    path = a_file(tmp_path, "tables: {jobs: {table: video_jobs}, asr_jobs: {schema: asr}, old: {}}")
    assert places({"REAPER_TABLES": " asr_jobs, extra ,jobs"}, path) == [
        ("asr_jobs", "asr", "asr_jobs"),
        ("extra", None, "extra"),
        ("jobs", None, "video_jobs"),
    ]


def test_a_flag_selects_tables_over_the_variable() -> None:
    settings = load(env={"REAPER_TABLES": "a,b"}, overrides={"tables": ["c"]})
    assert [spec.name for spec in settings.table_specs()] == ["c"]
    settings = load(env={}, overrides={"tables": "d,e"})
    assert [spec.name for spec in settings.table_specs()] == ["d", "e"]


@pytest.mark.parametrize(
    "text", [",", "jobs,", "jobs,,asr_jobs", "jobs,jobs", "jobs, jobs", "a\x00b", "x" * 128]
)
def test_empty_double_and_impossible_names_are_errors(text: str) -> None:
    (problem,) = problems_of({"REAPER_TABLES": text})
    assert (problem.key, problem.source) == ("tables", "env REAPER_TABLES")


@pytest.mark.parametrize("names", [[], {}, 5, [5], ["a", "a"]])
def test_a_flag_that_names_no_tables_is_an_error(names: object) -> None:
    with pytest.raises(ConfigError, match="table names separated by commas, each once"):
        load(env={}, overrides={"tables": names})


def test_a_dotted_name_is_schema_and_table_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert places({"REAPER_TABLES": "app.jobs"}) == [("app.jobs", "app", "jobs")]
    path = a_file(
        tmp_path, "tables: {app.jobs: {}, b.jobs: {table: x}, c.jobs: {schema: d}, e.f: {maxPerPass: 5}}"
    )
    assert places({}, path) == [
        ("app.jobs", "app", "jobs"),
        ("b.jobs", None, "x"),
        ("c.jobs", "d", "c.jobs"),
        ("e.f", "e", "f"),
    ]


@pytest.mark.parametrize("name", ["a.b.c", ".jobs", "app.", ".", "x" * 64, f"{'x' * 64}.jobs", '"jobs"'])
def test_a_name_that_cannot_be_a_table_is_an_error_that_says_what_to_do(name: str) -> None:
    (problem,) = problems_of({"REAPER_TABLES": name})
    assert problem.key.startswith("tables.")
    assert problem.allowed == "a Postgres name of 1 to 63 bytes, without quotes around it"


@pytest.mark.parametrize("name", ["''", "'a,b'", "' jobs'"])
def test_an_impossible_name_in_the_file_is_one_problem(tmp_path: Path, name: str) -> None:
    (problem,) = problems_of({}, a_file(tmp_path, f"tables: {{{name}: {{}}}}"))
    assert problem.allowed == "a name of 1 to 127 characters without a comma"


def test_a_wrong_selection_is_the_only_problem_while_nobody_knows_which_tables_are_meant(
    tmp_path: Path,
) -> None:
    path = a_file(tmp_path, "tables: {jobs: {table: x}, asr_jobs: {table: x}}")
    (problem,) = problems_of({"REAPER_TABLES": "jobs,"}, path)
    assert problem.source == "env REAPER_TABLES"


def test_names_that_need_quoting_are_kept_as_they_are(tmp_path: Path) -> None:
    path = a_file(tmp_path, """tables: {Jobs: {schema: "my app", table: 'we"ird'}, Überjobs: }""")
    assert places({}, path) == [("Jobs", "my app", 'we"ird'), ("Überjobs", None, "Überjobs")]


def test_a_name_is_measured_in_bytes_as_postgres_does() -> None:
    assert places({"REAPER_TABLES": "ü" * 31})
    assert problems_of({"REAPER_TABLES": "ü" * 32})


def test_two_names_for_one_table_are_an_error(tmp_path: Path) -> None:
    (problem,) = problems_of({}, a_file(tmp_path, "tables: {a: {table: jobs}, jobs: {}}"))
    assert (problem.key, problem.value, problem.hint) == (
        "tables.jobs.table",
        "jobs",
        "tables.a.table is the same",
    )
    (problem,) = problems_of(
        {"REAPER_TABLES": "app.jobs,x"}, a_file(tmp_path, "tables: {x: {schema: app, table: jobs}}")
    )
    assert problem.key == "tables.x.table"


def test_a_table_that_is_not_selected_does_not_clash_but_is_still_judged(tmp_path: Path) -> None:
    path = a_file(tmp_path, "tables: {a: {table: jobs}, jobs: {}}")
    assert places({"REAPER_TABLES": "jobs"}, path) == [("jobs", None, "jobs")]
    path = a_file(tmp_path, "tables: {a: {maxPerPass: -1}, jobs: {}}")
    assert problems_of({"REAPER_TABLES": "jobs"}, path)[0].key == "tables.a.maxPerPass"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("tables: {jobs: {columns: {stage: status}}}", "tables.jobs.columns.stage"),
        ("tables: {jobs: {statuses: {failed: done}}}", "tables.jobs.statuses.failed"),
        ("tables: {jobs: {events: {data: job_id}}}", "tables.jobs.events.data"),
        ("tables: {jobs: {events: {table: jobs}}}", "tables.jobs.events.table"),
        ("state: {table: asr_jobs}", "state.table"),
        ("state: {table: job_events}", "state.table"),
    ],
)
def test_two_meanings_behind_one_name_are_an_error(tmp_path: Path, text: str, key: str) -> None:
    assert problems_of({}, a_file(tmp_path, text))[0].key == key


def test_the_source_of_a_place_is_who_named_the_table(tmp_path: Path) -> None:
    settings = load(env={"REAPER_TABLES": "app.jobs,jobs"})
    assert settings.sources['tables."app.jobs".schema'] == "env REAPER_TABLES"
    assert settings.sources["tables.jobs.table"] == "default"
    path = a_file(tmp_path, "tables: {app.jobs: }")
    assert load(env={}, path=path).sources['tables."app.jobs".table'] == f"file {path}"


def test_a_flag_reaches_into_a_table_whose_name_has_a_dot() -> None:
    settings = load(env={"REAPER_TABLES": "app.jobs"}, overrides={'tables."app.jobs".maxPerPass': 5})
    assert settings.table_specs()[0].max_per_pass == 5
