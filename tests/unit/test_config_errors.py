"""What is wrong is said: key, value, what is allowed, where it came from, all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from reconciler.config import Settings, load
from reconciler.errors import ConfigError, Problem


def a_file(directory: Path, text: str) -> str:
    path = directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems_of(
    env: dict[str, str] | None = None, path: str | None = None, overrides: dict[str, object] | None = None
) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(env=env or {}, path=path, overrides=overrides)
    return caught.value.problems


def in_file(directory: Path, text: str) -> tuple[Problem, ...]:
    return problems_of(path=a_file(directory, text))


def test_all_problems_of_all_sources_come_at_once_and_each_has_its_parts(tmp_path: Path) -> None:
    path = a_file(tmp_path, "batch:\n  size: many\n  sise: 3\nattempts: {max: 0}\n")
    found = problems_of({"HEARTBEAT_SEC": "-5"}, path, {"interval.sec": "soon"})
    assert found == (
        Problem("batch.size", "many", "a whole number from 1 to 100000 (rows)", "", f"file {path}, line 2"),
        Problem(
            "batch.sise", "3", "one of the keys size, parallel", "Did you mean size?", f"file {path}, line 3"
        ),
        Problem("attempts.max", "0", "a whole number from 1 to 1000", "", f"file {path}, line 4"),
        Problem(
            "lease.heartbeatSec",
            "-5",
            "a whole number from 1 to 315360000 (seconds, at most ten years)",
            "",
            "env HEARTBEAT_SEC",
        ),
        Problem("interval.sec", "soon", "a number from 0.1 to 86400 (seconds)", "", "flag"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "-1",
        "0",
        "abc",
        "5000.5",
        "1e-1",
        "1e999",
        "e3",
        "1_000",
        "0x10",
        "５",
        "NaN",
        "inf",
        "true",
        "100001",
        "9" * 40,
        "60s",
        "--",
    ],
)
def test_a_wrong_number_is_never_a_silent_default(text: str) -> None:
    (problem,) = problems_of({"REAPER_BATCH_SIZE": text})
    assert (problem.key, problem.value, problem.source) == ("batch.size", text, "env REAPER_BATCH_SIZE")


@pytest.mark.parametrize(
    "value",
    [True, 5.5, float("nan"), float("inf"), pytest.param(10**5000, id="huge"), [1], {"a": 1}, object(), b"5"],
)
def test_a_flag_of_a_wrong_type_is_refused(value: object) -> None:
    (problem,) = problems_of(overrides={"batch.size": value})
    assert problem.key == "batch.size"


@pytest.mark.parametrize("value", [30, "30", 30.0, " 30 ", "30.0", "3e+01", "0.3E2"])
def test_a_whole_number_may_be_typed_or_text(value: object) -> None:
    assert load(env={}, overrides={"batch.size": value}).batch_size == 30


def test_a_number_with_a_unit_gets_a_hint() -> None:
    (problem,) = problems_of({"REAPER_INTERVAL_SEC": "60s"})
    assert problem.hint == "Write the bare number without a unit: the key says what it counts (60?)"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CLIP_SLA_FACTOR", "0"),
        ("CLIP_SLA_FACTOR", "-6"),
        ("CLIP_SLA_FACTOR", "10001"),
        ("CLIP_SLA_FACTOR", "0.0000001"),
        ("CLIP_SLA_FACTOR", "6.0000001"),
        ("DEFAULT_LEASE_SEC", "315360001"),
        ("LEASE_TIMEOUT_SEC", "0"),
        ("QUEUE_RETRY_BACKOFF_MS_MAX", "315360000001"),
        ("REAPER_METRICS_PORT", "65536"),
        ("REAPER_DRY_RUN", "maybe"),
        ("REAPER_LIVENESS", "k8s"),
        ("AI_LOG_LEVEL", "loud"),
        ("REAPER_POD_NAMESPACE", "Not_A_Namespace"),
        ("REAPER_PUSHGATEWAY_URL", "push:9091"),
        ("PGBOSS_RETRY_BACKOFF", "2"),
        ("PGBOSS_TEAM_SIZE", "0"),
    ],
)
def test_a_value_outside_its_bounds_is_an_error(name: str, text: str) -> None:
    (problem,) = problems_of({name: text})
    assert problem.source == f"env {name}"
    assert problem.allowed


def test_a_wrong_value_is_reported_even_where_another_one_hides_it(tmp_path: Path) -> None:
    path = a_file(tmp_path, "batch: {size: -1}")
    env = {"REAPER_BATCH_SIZE": "100", "JOB_MAX_ATTEMPTS": "3", "QUEUE_MAX_ATTEMPTS": "none"}
    assert [problem.source for problem in problems_of(env, path)] == [
        f"file {path}, line 1",
        "env QUEUE_MAX_ATTEMPTS",
    ]


def test_a_wrong_alias_behind_a_right_name_is_one_problem() -> None:
    (problem,) = problems_of({"HEARTBEAT_SEC": "10", "HEARTBEAT_INTERVAL_SEC": "ten"})
    assert problem.source == "env HEARTBEAT_INTERVAL_SEC"


# ── Rules over several keys ─────────────────────────────────────────────────────────────────────────


def test_three_beats_must_fit_into_the_default_lease() -> None:
    (problem,) = problems_of({"HEARTBEAT_SEC": "15", "DEFAULT_LEASE_SEC": "44"})
    assert problem.key == "lease.heartbeatSec"
    assert problem.allowed == "at most a third of lease.defaultSec (44): 14"
    assert load(env={"HEARTBEAT_SEC": "15", "DEFAULT_LEASE_SEC": "45"}).warnings == ()


def test_the_key_somebody_gave_is_blamed_not_the_default() -> None:
    (problem,) = problems_of({"QUEUE_VISIBILITY_SEC": "30"})
    assert (problem.key, problem.source) == ("lease.defaultSec", "env QUEUE_VISIBILITY_SEC")
    assert problem.allowed == "at least 3 x lease.heartbeatSec (15): 45"


def test_a_rule_is_silent_where_its_input_is_wrong_already() -> None:
    (problem,) = problems_of({"HEARTBEAT_SEC": "200", "DEFAULT_LEASE_SEC": "soon"})
    assert problem.key == "lease.defaultSec"


def test_a_rule_speaks_beside_problems_that_are_not_its_own() -> None:
    keys = {problem.key for problem in problems_of({"HEARTBEAT_SEC": "200", "REAPER_BATCH_SIZE": "x"})}
    assert keys == {"lease.heartbeatSec", "batch.size"}


def test_a_slow_beat_is_a_warning_only_above_fifteen_seconds() -> None:
    assert load(env={"HEARTBEAT_SEC": "15"}).warnings == ()
    assert load(env={"HEARTBEAT_SEC": "16"}).warnings == (
        "lease.heartbeatSec is 16: workers should beat every 10 to 15 s",
    )


def test_a_lease_timeout_shorter_than_three_beats_is_a_warning() -> None:
    (warning,) = load(env={"LEASE_TIMEOUT_SEC": "44"}).warnings
    assert "taken from a living worker" in warning
    assert load(env={"LEASE_TIMEOUT_SEC": "45"}).warnings == ()


def test_a_lock_timeout_that_never_applies_is_a_warning() -> None:
    (warning,) = load(env={}, overrides={"database.lockTimeoutMs": 30_000}).warnings
    assert warning.startswith("database.lockTimeoutMs (30000) never applies")


def test_a_cap_below_the_base_is_an_error() -> None:
    (problem,) = problems_of({"JOB_RETRY_BACKOFF_MS_BASE": "5000", "QUEUE_RETRY_BACKOFF_MS_MAX": "4999"})
    assert (problem.key, problem.allowed) == ("backoff.maxMs", "at least backoff.baseMs (5000)")
    (problem,) = problems_of({"JOB_RETRY_BACKOFF_MS_BASE": "600001"})
    assert (problem.key, problem.hint) == ("backoff.baseMs", "Set the cap as well")


@pytest.mark.parametrize("steps", ["[]", "[30, 10]", "[0]", "[a]", "30s", "{a: 1}", "[[1]]", "[1,,2]"])
def test_a_wrong_ladder_is_an_error(tmp_path: Path, steps: str) -> None:
    found = in_file(tmp_path, f"backoff: {{stepsSec: {steps}}}")
    assert [problem.key for problem in found][-1] in ("backoff.stepsSec", "REAPER_CONFIG")


# ── Unknown keys and variables ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("batsh: {size: 1}", "batsh", "Did you mean batch?"),
        ("lease: {heartbeat_sec: 5}", "lease.heartbeat_sec", "Did you mean heartbeatSec?"),
        ("heartbeatSec: 5", "heartbeatSec", "Did you mean lease.heartbeatSec?"),
        ("tables: {jobs: {colums: {id: a}}}", "tables.jobs.colums", "Did you mean columns?"),
        (
            "tables: {a: {columns: {leaseExpireAt: a}}}",
            "tables.a.columns.leaseExpireAt",
            "Did you mean leaseExpiresAt?",
        ),
        ("stages: {dub: {factr: 2}}", "stages.dub.factr", "Did you mean factor?"),
        ("liveness: {causes: {a: {failafter: 2}}}", "liveness.causes.a.failafter", "Did you mean failAfter?"),
        ("xyzzy: 1", "xyzzy", ""),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(
    tmp_path: Path, text: str, key: str, hint: str
) -> None:
    problem = in_file(tmp_path, text)[0]
    assert (problem.key, problem.hint) == (key, hint)


def test_an_unknown_section_is_one_problem_however_much_it_holds(tmp_path: Path) -> None:
    assert len(in_file(tmp_path, "unknown: {a: 1, b: {c: 2, d: [3]}}")) == 1


def test_an_unknown_reaper_variable_is_a_warning_with_the_nearest_name() -> None:
    (warning,) = load(env={"REAPER_BATCHSIZE": "5"}).warnings
    assert warning == (
        "REAPER_BATCHSIZE is not a variable of job-reaper and is ignored. Did you mean REAPER_BATCH_SIZE?"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REAPER_PORT", "tcp://10.0.0.1:8080"),
        ("REAPER_SERVICE_HOST", "10.0.0.1"),
        ("REAPER_SERVICE_PORT", "8080"),
        ("REAPER_SERVICE_PORT_METRICS", "8080"),
        ("REAPER_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
        ("REAPER_PORT_8080_TCP_PROTO", "tcp"),
        ("REAPER_UI_PORT_8080_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_what_kubernetes_injects_for_a_service_is_ignored_silently(name: str, value: str) -> None:
    assert load(env={name: value}).warnings == ()


def test_a_misspelt_port_is_not_taken_for_a_service_link() -> None:
    (warning,) = load(env={"REAPER_METRIC_PORT": "9090"}).warnings
    assert "Did you mean REAPER_METRICS_PORT?" in warning
    assert len(load(env={"REAPER_UPSTREAM": "tcp://10.0.0.1:8080"}).warnings) == 1


def test_a_service_called_reaper_metrics_does_not_break_the_port() -> None:
    settings = load(env={"REAPER_METRICS_PORT": "tcp://10.0.0.1:8080"})
    assert settings.metrics_port == 8080
    assert settings.sources["metrics.port"] == "default"
    assert "enableServiceLinks" in settings.warnings[0]


def test_an_unknown_flag_is_an_error() -> None:
    assert problems_of(overrides={"batch.sise": 1})[0].hint == "Did you mean size?"
    for key in ('tables."open', "batch..size", "", "batch."):
        assert problems_of(overrides={key: 1})[0].source == "flag"


# ── Secrets ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "dsn",
    [
        "mysql://root:hunter2@db/app",
        "jdbc:postgresql://db/app?password=hunter2",
        "hunter2",
        "postgresql://u:hunter2@db/app?schema=public",
        "postgresql://u:hunter2@db/a\x00pp",
    ],
)
def test_a_wrong_dsn_is_refused_without_being_shown(dsn: str) -> None:
    (problem,) = problems_of({"DATABASE_URL": dsn})
    assert (problem.key, problem.source) == ("database.url", "env DATABASE_URL")
    assert "hunter2" not in str(problem)


def test_a_parameter_libpq_does_not_know_is_named() -> None:
    (problem,) = problems_of({"DATABASE_URL": "postgresql://u:p@db/app?sslmode=require&schema=public"})
    assert problem.hint == "libpq does not know the parameter 'schema': remove it from the URL"


@pytest.mark.parametrize(
    "dsn",
    ["postgres://h/d", "postgresql://u:p@h:5432,i/d?sslmode=require", "host=/tmp dbname=a", "service=x"],
)
def test_a_dsn_reaches_the_settings_as_it_is(dsn: str) -> None:
    assert load(env={"DATABASE_URL": f"{dsn}\n"}).dsn == dsn


def test_a_dsn_in_the_file_is_refused_and_not_shown(tmp_path: Path) -> None:
    (problem,) = in_file(tmp_path, "database: {url: 'postgresql://u:hunter2@db/app'}")
    assert (problem.value, problem.hint) == ("(hidden)", "Set DATABASE_URL from a Secret instead")


@pytest.mark.parametrize(
    "text",
    [
        "password: hunter2",
        "database: {pasword: hunter2}",
        "database: hunter2",
        "batch: {size: 'postgresql://u:hunter2@h/d'}",
        "database: {url: [hunter2]}",
        "metrics: {pushgateway: 'ftp://u:hunter2@h'}",
        "database: {url: 'x: hunter2: y'\n",
        "url: hunter2: x",
    ],
)
def test_a_secret_in_the_wrong_place_does_not_reach_the_error(tmp_path: Path, text: str) -> None:
    path = a_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(env={"REAPER_LIVENESS": "postgresql://u:hunter2@h/d"}, path=path)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value.__context__)


def test_settings_do_not_print_their_secrets() -> None:
    env = {"DATABASE_URL": "postgresql://u:hunter2@h/d", "REAPER_PUSHGATEWAY_URL": "http://u:hunter2@push"}
    settings = load(env=env)
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in str(settings)
    assert settings.pushgateway_url == "http://u:hunter2@push"


def test_settings_built_by_hand_do_not_print_a_wrong_secret() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"database": {"url": "mysql://u:hunter2@h/d"}})
    assert "hunter2" not in str(caught.value)
