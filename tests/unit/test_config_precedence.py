"""Flags over environment over file over the variables that are only defaults over our own defaults."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from pydantic import ValidationError

from reconciler import model
from reconciler.config import Settings, load
from reconciler.config.describe import describe
from reconciler.errors import ConfigError


def a_file(directory: Path, text: str) -> str:
    path = directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def value_of(settings: Settings, key: str) -> object:
    return next(row["value"] for row in describe(settings) if row["key"] == key)


def test_without_anything_the_defaults_of_the_documents_hold() -> None:
    settings = load(env={})
    assert settings.policy() == model.Policy()
    assert settings.table_specs() == (
        model.TableSpec(name="jobs", table="jobs"),
        model.TableSpec(name="asr_jobs", table="asr_jobs"),
    )
    assert settings.dsn is None
    assert settings.warnings == ()
    assert set(settings.sources.values()) == {"default"}


def test_settings_built_by_hand_are_the_defaults_too_and_frozen() -> None:
    by_hand = Settings()
    assert by_hand.policy() == model.Policy()
    assert by_hand.table_specs() == load(env={}).table_specs()
    with pytest.raises(ValidationError, match="frozen"):
        by_hand.dry_run = True
    with pytest.raises(ValidationError):
        Settings.model_validate({"batch": {"size": -1}})


def test_the_plain_attributes_are_those_the_commands_read() -> None:
    settings = load(env={})
    assert {
        "interval_sec": settings.interval_sec,
        "batch_size": settings.batch_size,
        "parallel": settings.parallel,
        "dry_run": settings.dry_run,
        "liveness_mode": settings.liveness_mode,
        "pod_namespace": settings.pod_namespace,
        "metrics_port": settings.metrics_port,
        "pushgateway_url": settings.pushgateway_url,
        "pushgateway_job": settings.pushgateway_job,
        "log_level": settings.log_level,
        "ai_log_level": settings.ai_log_level,
        "state_table": settings.state_table,
        "state_schema": settings.state_schema,
        "statement_timeout_ms": settings.statement_timeout_ms,
        "lock_timeout_ms": settings.lock_timeout_ms,
        "connect_timeout_sec": settings.connect_timeout_sec,
        "max_concurrency": settings.max_concurrency,
        "lease_timeout_sec": settings.lease_timeout_sec,
    } == {
        "interval_sec": 60.0,
        "batch_size": 5000,
        "parallel": 2,
        "dry_run": False,
        "liveness_mode": "auto",
        "pod_namespace": None,
        "metrics_port": 8080,
        "pushgateway_url": None,
        "pushgateway_job": "job-reaper",
        "log_level": "info",
        "ai_log_level": "warn",
        "state_table": "reaper_state",
        "state_schema": None,
        "statement_timeout_ms": 30_000,
        "lock_timeout_ms": 2000,
        "connect_timeout_sec": 10,
        "max_concurrency": 5,
        "lease_timeout_sec": 300,
    }


# Every variable of the documents, SPEC.md decision 8 and the interface: name, text, key, value.
VARIABLES = [
    ("REAPER_INTERVAL_SEC", "90", "interval.sec", 90),
    ("RECOVERY_SCAN_INTERVAL_SEC", "45", "interval.sec", 45),
    ("JOB_MAX_ATTEMPTS", "5", "attempts.max", 5),
    ("QUEUE_MAX_ATTEMPTS", "6", "attempts.max", 6),
    ("MAX_ATTEMPTS", "7", "attempts.max", 7),
    ("DEFAULT_LEASE_SEC", "400", "lease.defaultSec", 400),
    ("QUEUE_VISIBILITY_SEC", "500", "lease.defaultSec", 500),
    ("HEARTBEAT_SEC", "10", "lease.heartbeatSec", 10),
    ("HEARTBEAT_INTERVAL_SEC", "11", "lease.heartbeatSec", 11),
    ("LEASE_TIMEOUT_SEC", "120", "lease.timeoutSec", 120),
    ("CLIP_SLA_FACTOR", "6.5", "stages.clip.factor", 6.5),
    ("ASR_SLA_FACTOR", "13", "stages.asr.factor", 13),
    ("BURNIN_SLA_FACTOR", "9", "stages.burnin.factor", 9),
    ("JOB_RETRY_BACKOFF_MS_BASE", "1000", "backoff.baseMs", 1000),
    ("JOB_RETRY_BACKOFF_MS_MAX", "40000", "backoff.maxMs", 40_000),
    ("QUEUE_RETRY_BACKOFF_MS_BASE", "2000", "backoff.baseMs", 2000),
    ("QUEUE_RETRY_BACKOFF_MS_MAX", "50000", "backoff.maxMs", 50_000),
    ("MAX_CONCURRENCY", "3", "worker.maxConcurrency", 3),
    ("PGBOSS_TEAM_SIZE", "4", "worker.maxConcurrency", 4),
    ("SCRATCH_DIR", "/scratch", "worker.scratchDir", "/scratch"),
    ("PGBOSS_RETRY_LIMIT", "0", "dualRecord.retryLimit", 0),
    ("PGBOSS_RETRY_DELAY", "30", "dualRecord.retryDelaySec", 30),
    ("PGBOSS_RETRY_BACKOFF", "false", "dualRecord.retryBackoff", False),
    ("PGBOSS_EXPIRE_IN_SECONDS", "1800", "dualRecord.expireInSec", 1800),
    ("AI_LOG_LEVEL", "debug", "log.aiLevel", "debug"),
    ("DATABASE_URL", "postgresql://h/d", "database.url", "postgresql://h/d"),
    ("REAPER_BATCH_SIZE", "100", "batch.size", 100),
    ("REAPER_PARALLEL", "1", "batch.parallel", 1),
    ("REAPER_DRY_RUN", "yes", "dryRun", True),
    ("REAPER_LIVENESS", "off", "liveness.mode", "off"),
    ("REAPER_POD_NAMESPACE", "video", "liveness.podNamespace", "video"),
    ("REAPER_METRICS_PORT", "9090", "metrics.port", 9090),
    ("REAPER_PUSHGATEWAY_URL", "http://push:9091", "metrics.pushgateway", "http://push:9091"),
    ("REAPER_PUSHGATEWAY_JOB", "reaper-eu", "metrics.pushgatewayJob", "reaper-eu"),
    ("REAPER_LOG_LEVEL", "WARNING", "log.level", "warn"),
]


@pytest.mark.parametrize(("name", "text", "key", "value"), VARIABLES, ids=[row[0] for row in VARIABLES])
def test_a_variable_sets_its_key_and_is_named_as_its_source(
    name: str, text: str, key: str, value: object
) -> None:
    settings = load(env={name: text})
    assert value_of(settings, key) == value
    assert settings.sources[key] == f"env {name}"


def test_the_list_above_knows_every_variable_the_code_reads() -> None:
    from reconciler.config.environment import variables

    by_stage = {"CLIP_SLA_FACTOR", "ASR_SLA_FACTOR", "BURNIN_SLA_FACTOR"}
    assert {row[0] for row in VARIABLES} - by_stage == set(variables())


# What each variable does against a file that sets the same key.
FILE_LINES = {
    "interval.sec": "interval: {sec: 70}",
    "attempts.max": "attempts: {max: 9}",
    "lease.defaultSec": "lease: {defaultSec: 350}",
    "lease.heartbeatSec": "lease: {heartbeatSec: 12}",
    "lease.timeoutSec": "lease: {timeoutSec: 99}",
    "stages.clip.factor": "stages: {clip: {factor: 2}}",
    "stages.asr.factor": "stages: {asr: {factor: 2}}",
    "stages.burnin.factor": "stages: {burnin: {factor: 2}}",
    "backoff.baseMs": "backoff: {baseMs: 3000, maxMs: 60000}",
    "backoff.maxMs": "backoff: {baseMs: 3000, maxMs: 60000}",
    "worker.maxConcurrency": "worker: {maxConcurrency: 8}",
    "worker.scratchDir": "worker: {scratchDir: /other}",
    "dualRecord.retryLimit": "dualRecord: {retryLimit: 9}",
    "dualRecord.retryDelaySec": "dualRecord: {retryDelaySec: 9}",
    "dualRecord.retryBackoff": "dualRecord: {retryBackoff: true}",
    "dualRecord.expireInSec": "dualRecord: {expireInSec: 9}",
    "log.aiLevel": "log: {aiLevel: error}",
    "log.level": "log: {level: error}",
    "batch.size": "batch: {size: 9}",
    "batch.parallel": "batch: {parallel: 9}",
    "dryRun": "dryRun: false",
    "liveness.mode": "liveness: {mode: kubernetes}",
    "liveness.podNamespace": "liveness: {podNamespace: other}",
    "metrics.port": "metrics: {port: 9}",
    "metrics.pushgateway": "metrics: {pushgateway: 'http://other'}",
    "metrics.pushgatewayJob": "metrics: {pushgatewayJob: other}",
}
ONLY_DEFAULTS = {
    "QUEUE_VISIBILITY_SEC",
    "QUEUE_MAX_ATTEMPTS",
    "MAX_ATTEMPTS",
    "PGBOSS_TEAM_SIZE",
    "PGBOSS_RETRY_LIMIT",
    "PGBOSS_RETRY_DELAY",
    "PGBOSS_RETRY_BACKOFF",
    "PGBOSS_EXPIRE_IN_SECONDS",
}


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [row for row in VARIABLES if row[0] != "DATABASE_URL"],
    ids=[row[0] for row in VARIABLES if row[0] != "DATABASE_URL"],
)
def test_the_file_yields_to_a_variable_but_not_to_one_that_is_only_a_default(
    tmp_path: Path, name: str, text: str, key: str, value: object
) -> None:
    path = a_file(tmp_path, FILE_LINES[key])
    settings = load(env={name: text}, path=path)
    if name in ONLY_DEFAULTS:
        assert settings.sources[key] == f"file {path}"
        assert value_of(settings, key) != value
    else:
        assert settings.sources[key] == f"env {name}"
        assert value_of(settings, key) == value


@pytest.mark.parametrize(
    ("strong", "weak", "key"),
    [
        ("REAPER_INTERVAL_SEC", "RECOVERY_SCAN_INTERVAL_SEC", "interval.sec"),
        ("HEARTBEAT_SEC", "HEARTBEAT_INTERVAL_SEC", "lease.heartbeatSec"),
        ("JOB_MAX_ATTEMPTS", "QUEUE_MAX_ATTEMPTS", "attempts.max"),
        ("JOB_MAX_ATTEMPTS", "MAX_ATTEMPTS", "attempts.max"),
        ("QUEUE_MAX_ATTEMPTS", "MAX_ATTEMPTS", "attempts.max"),
        ("JOB_RETRY_BACKOFF_MS_BASE", "QUEUE_RETRY_BACKOFF_MS_BASE", "backoff.baseMs"),
        ("MAX_CONCURRENCY", "PGBOSS_TEAM_SIZE", "worker.maxConcurrency"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_of_two_variables_for_one_key_the_stronger_wins_in_any_order(
    strong: str, weak: str, key: str, turned: bool
) -> None:
    env = {strong: "11", weak: "12"}
    settings = load(env=dict(reversed(env.items())) if turned else env)
    assert value_of(settings, key) == 11
    assert settings.sources[key] == f"env {strong}"


def test_job_backoff_variables_beat_queue_ones_at_the_cap_too() -> None:
    settings = load(env={"JOB_RETRY_BACKOFF_MS_MAX": "70000", "QUEUE_RETRY_BACKOFF_MS_MAX": "80000"})
    assert settings.policy().backoff.max_ms == 70_000


def test_default_lease_beats_queue_visibility() -> None:
    assert load(env={"DEFAULT_LEASE_SEC": "90", "QUEUE_VISIBILITY_SEC": "95"}).lease.default_sec == 90


def test_an_alias_that_disagrees_is_named_in_a_warning_and_one_that_agrees_is_not() -> None:
    settings = load(env={"HEARTBEAT_SEC": "15", "HEARTBEAT_INTERVAL_SEC": "12"})
    assert settings.warnings == ("env HEARTBEAT_INTERVAL_SEC (12) is ignored: env HEARTBEAT_SEC says 15",)
    assert load(env={"HEARTBEAT_SEC": "15", "HEARTBEAT_INTERVAL_SEC": "15"}).warnings == ()
    assert load(env={"JOB_MAX_ATTEMPTS": "4", "QUEUE_MAX_ATTEMPTS": "5"}).warnings == ()
    layered = {"JOB_RETRY_BACKOFF_MS_BASE": "4", "QUEUE_RETRY_BACKOFF_MS_BASE": "5"}
    assert load(env=layered).warnings == ()


def test_flags_beat_everything_and_none_means_that_a_flag_was_not_used(tmp_path: Path) -> None:
    path = a_file(tmp_path, "batch: {size: 10}")
    env = {"REAPER_BATCH_SIZE": "20", "REAPER_DRY_RUN": "true"}
    settings = load(env=env, path=path, overrides={"batch.size": 30, "dryRun": None})
    assert (settings.batch_size, settings.dry_run) == (30, True)
    assert settings.sources["batch.size"] == "flag"


def test_the_path_of_the_file_comes_from_reaper_config_unless_given(tmp_path: Path) -> None:
    path = a_file(tmp_path, "batch: {size: 10}")
    assert load(env={"REAPER_CONFIG": path}).batch_size == 10
    assert load(env={"REAPER_CONFIG": "/nowhere"}, path=path).batch_size == 10


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REAPER_BATCH_SIZE", "77")
    assert load().batch_size == 77


@pytest.mark.parametrize("name", [row[0] for row in VARIABLES] + ["REAPER_CONFIG", "REAPER_TABLES"])
@pytest.mark.parametrize("empty", ["", "  ", "\n"])
def test_a_variable_set_to_nothing_counts_as_not_set(name: str, empty: str) -> None:
    settings = load(env={name: empty})
    assert settings.checksum == load(env={}).checksum
    assert set(settings.sources.values()) == {"default"}


def test_lease_timeout_follows_the_default_lease_until_it_is_set() -> None:
    assert load(env={"DEFAULT_LEASE_SEC": "400"}).policy().lease_timeout_sec == 400
    assert load(env={"QUEUE_VISIBILITY_SEC": "410"}).policy().lease_timeout_sec == 410
    assert load(env={"DEFAULT_LEASE_SEC": "400", "LEASE_TIMEOUT_SEC": "60"}).policy().lease_timeout_sec == 60


def test_new_stages_need_no_code_and_get_their_own_variable(tmp_path: Path) -> None:
    path = a_file(tmp_path, "stages: {dub: {factor: 2.5}, burn-in: 4, asr: 13}")
    factors = load(env={"DUB_SLA_FACTOR": "3", "BURN_IN_SLA_FACTOR": "5.25"}, path=path).policy().sla.factors
    assert factors == {
        "clip": Decimal(6),
        "asr": Decimal(13),
        "burnin": Decimal(8),
        "dub": Decimal(3),
        "burn-in": Decimal("5.25"),
    }


def test_factors_are_exact() -> None:
    assert load(env={"CLIP_SLA_FACTOR": "1.1"}).policy().sla.factors["clip"] == Decimal("1.1")


def test_a_factor_for_a_stage_nobody_configured_is_warned_about() -> None:
    (warning,) = load(env={"DUB_SLA_FACTOR": "3"}).warnings
    assert warning.startswith("DUB_SLA_FACTOR is ignored")
    assert "Add dub under stages" in warning


def test_one_backoff_variable_switches_to_doubling_and_the_other_end_has_its_default() -> None:
    assert load(env={"QUEUE_RETRY_BACKOFF_MS_BASE": "1000"}).policy().backoff == model.BackoffPolicy(
        base_ms=1000, max_ms=600_000
    )
    assert load(env={"QUEUE_RETRY_BACKOFF_MS_MAX": "60000"}).policy().backoff == model.BackoffPolicy(
        base_ms=30_000, max_ms=60_000
    )


def test_a_cap_below_the_default_base_holds_from_the_first_wait() -> None:
    backoff = load(env={"QUEUE_RETRY_BACKOFF_MS_MAX": "10000"}).policy().backoff
    assert (backoff.base_ms, backoff.max_ms) == (10_000, 10_000)


def test_backoff_variables_beat_the_files_ladder_and_a_ladder_flag_beats_them(tmp_path: Path) -> None:
    path = a_file(tmp_path, "backoff: {stepsSec: [5, 10]}")
    assert load(env={}, path=path).policy().backoff == model.BackoffPolicy(steps_sec=(5.0, 10.0))
    env = {"QUEUE_RETRY_BACKOFF_MS_BASE": "1000"}
    assert load(env=env, path=path).policy().backoff.base_ms == 1000
    forced = load(env=env, path=path, overrides={"backoff.stepsSec": [7]})
    assert forced.policy().backoff == model.BackoffPolicy(steps_sec=(7.0,))


def test_a_file_that_gives_both_forms_of_backoff_is_refused(tmp_path: Path) -> None:
    path = a_file(tmp_path, "backoff: {stepsSec: [5], baseMs: 1000}")
    with pytest.raises(ConfigError, match=r"backoff\.baseMs is given as well"):
        load(env={}, path=path)


@pytest.mark.parametrize("word", ["true", "1", "yes", "on", "TRUE", " Yes "])
def test_words_for_true(word: str) -> None:
    assert load(env={"REAPER_DRY_RUN": word}).dry_run is True


@pytest.mark.parametrize("word", ["false", "0", "no", "off", "OFF"])
def test_words_for_false(word: str) -> None:
    assert load(env={"REAPER_DRY_RUN": word}).dry_run is False
