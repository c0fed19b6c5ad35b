"""The YAML file: read as it was written, refused as a whole or by line."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from reconciler.config import load
from reconciler.config.file import MAX_BYTES
from reconciler.errors import ConfigError, Problem


def a_file(directory: Path, text: str | bytes) -> str:
    path = directory / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def only_problem(path: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load(env={"REAPER_CONFIG": path})
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "null", "{}", "---\n", "batch:\n", "batch: {}\nstages: null\n", "\ufeff"]
)
def test_a_file_that_says_nothing_leaves_the_defaults(tmp_path: Path, text: str) -> None:
    settings = load(env={}, path=a_file(tmp_path, text))
    assert settings.checksum == load(env={}).checksum


def test_the_whole_shape_is_understood(tmp_path: Path) -> None:
    path = a_file(
        tmp_path,
        """
tables:
  jobs:
    kind: lease
    schema: app
    table: video jobs
    columns: {leaseExpiresAt: lease_until, id: job_uuid}
    statuses: {queued: PENDING, processing: RUNNING, done: COMPLETED, failed: FAILED}
    events: {schema: audit, table: events, jobId: job, data: payload}
    maxPerPass: 10
  asr_jobs:
stages: {clip: {factor: 6.25}, dub: 3}
lease: {defaultSec: 600, heartbeatSec: 10, timeoutSec: 700}
attempts: {max: 4}
backoff: {baseMs: 1000, maxMs: 8000}
liveness:
  mode: off
  deferFactor: 0.5
  deferMaxSec: 60
  clockSkewSec: 5
  maxHolders: 10
  podSelector: app=worker
  cluster: eu-1
  podNamespace: video
  trustNotFound: yes
  identityPatterns: ["w-{pod}"]
  causes: {OOMKilled: {failAfter: 2}, Evicted: {countsAttempt: false}, Error: }
  refundBudget: 2
brake: {maxExpiredShare: 0.5, outageGraceSec: 120}
batch: {size: 100, parallel: 1}
interval: {sec: 0.5}
database: {statementTimeoutMs: 1000, lockTimeoutMs: 100, connectTimeoutSec: 3}
state: {schema: ops, table: state}
metrics: {port: 0, pushgateway: "http://push", pushgatewayJob: j}
log: {level: debug, aiLevel: info}
worker: {maxConcurrency: 9, scratchDir: /tmp/s}
dualRecord: {retryLimit: 1, retryDelaySec: 2, retryBackoff: off, expireInSec: 4}
dryRun: on
""",
    )
    settings = load(env={}, path=path)
    jobs, asr_jobs = settings.table_specs()
    assert (jobs.schema, jobs.table, jobs.max_per_pass) == ("app", "video jobs", 10)
    assert (jobs.columns.lease_expires_at, jobs.columns.id, jobs.columns.stage) == (
        "lease_until",
        "job_uuid",
        "stage",
    )
    assert (jobs.statuses.queued, jobs.statuses.failed) == ("PENDING", "FAILED")
    assert (jobs.events.schema, jobs.events.table, jobs.events.job_id, jobs.events.data) == (
        "audit", "events", "job", "payload",
    )  # fmt: skip
    assert (asr_jobs.name, asr_jobs.table, asr_jobs.schema) == ("asr_jobs", "asr_jobs", None)
    policy = settings.policy()
    assert str(policy.sla.factors["clip"]) == "6.25"
    assert (policy.liveness.defer_factor, policy.liveness.defer_max_sec) == (0.5, 60)
    assert (policy.liveness.clock_skew_sec, policy.liveness.max_holders) == (5, 10)
    assert (policy.brake.max_expired_share, policy.brake.outage_grace_sec) == (0.5, 120)
    assert (policy.max_attempts, policy.lease_timeout_sec, policy.heartbeat_sec) == (4, 700, 10)
    assert (policy.interval_sec, policy.batch_size) == (0.5, 100)
    assert (policy.backoff.base_ms, policy.backoff.max_ms) == (1000, 8000)
    liveness = settings.liveness
    assert (liveness.mode, liveness.trust_not_found, liveness.cluster) == ("off", True, "eu-1")
    assert liveness.identity_patterns == ("w-{pod}",)
    assert {name: (c.counts_attempt, c.fail_after) for name, c in liveness.causes.items()} == {
        "OOMKilled": (True, 2),
        "Evicted": (False, None),
        "Error": (True, None),
    }
    assert (settings.dry_run, settings.dual_record.retry_backoff, settings.metrics_port) == (True, False, 0)
    assert (settings.state_schema, settings.state_table) == ("ops", "state")
    assert settings.warnings == ()


def test_yaml_1_1_surprises_do_not_happen(tmp_path: Path) -> None:
    text = "liveness: {mode: off, cluster: 010}\ntables: {on: {statuses: {done: yes, failed: no}}}\n"
    settings = load(env={}, path=a_file(tmp_path, text))
    (spec,) = settings.table_specs()
    assert (spec.table, spec.statuses.done, spec.statuses.failed) == ("on", "yes", "no")
    assert (settings.liveness_mode, settings.liveness.cluster) == ("off", "010")
    assert only_problem(a_file(tmp_path, "interval: {sec: 1:30}")).value == "1:30"


def test_quoted_null_is_a_word_and_plain_null_is_nothing(tmp_path: Path) -> None:
    settings = load(env={}, path=a_file(tmp_path, "tables: {jobs: {schema: 'null'}, b: {schema: null}}"))
    assert [spec.schema for spec in settings.table_specs()] == ["null", None]


def test_anchors_work(tmp_path: Path) -> None:
    text = "tables:\n  a: {statuses: &words {done: OK}}\n  b: {statuses: *words}\n"
    assert [spec.statuses.done for spec in load(env={}, path=a_file(tmp_path, text)).table_specs()] == [
        "OK",
        "OK",
    ]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("batch: {size: 1", "Invalid YAML at line 1, column 16: "),
        ("a: 1\nb: : 2\n", "Invalid YAML at line 2, column 4: "),
        ("a: 1\n\tb: 2\n", "Invalid YAML at line 2, column 1: "),
        ("- 1\n", "The file must be a mapping"),
        ("text", "The file must be a mapping"),
        ("a: 1\n---\nb: 2\n", "Invalid YAML at line 2, column 1: "),
        ("a: !!python/object/apply:os.system [ls]\n", "Line 1: the tag"),
        ("a: !secret x\n", "Line 1: the tag !secret"),
        ("a: &a [*a]\n", "nested more than 50 levels"),
        ("a: " + "[" * 60 + "]" * 60, "nested more than 50 levels"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested more than 50 levels"),
        ("a: " + "- " * 5000 + "1", "Invalid YAML"),
        ("{" * 50_001, "more than 50000 values"),
        ("a: \x01\n", "Invalid YAML"),
        (b"a: \xff\n", "not UTF-8 (byte 3)"),
        ("#" * (MAX_BYTES + 1), "larger than 256 KiB"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_named_with_the_place(
    tmp_path: Path, text: str | bytes, hint: str
) -> None:
    path = a_file(tmp_path, text)
    problem = only_problem(path)
    assert (problem.key, problem.allowed) == ("REAPER_CONFIG", "a readable YAML file")
    assert hint in problem.hint
    assert problem.source == "env REAPER_CONFIG"


def test_a_small_file_that_unfolds_into_too_many_values_is_refused(tmp_path: Path) -> None:
    lines = ["a: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 5)]
    assert "more than 50000 values" in only_problem(a_file(tmp_path, "\n".join(lines))).hint


def test_a_missing_file_a_directory_and_a_wrong_path_are_errors(tmp_path: Path) -> None:
    assert only_problem(str(tmp_path / "no.yaml")).hint == "No such file or directory"
    assert only_problem(str(tmp_path)).hint == "Is a directory"
    assert only_problem("a\x00b").hint == "This is not a path"


def test_an_unreadable_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = a_file(tmp_path, "{}")

    def refused(*_: object) -> NoReturn:  # root, who runs these tests in a container, reads everything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr("builtins.open", refused)
    assert only_problem(path).hint == "Permission denied"


def test_a_key_given_twice_is_an_error_not_the_last_one(tmp_path: Path) -> None:
    path = a_file(tmp_path, "batch:\n  size: 1\n  size: 2\n")
    problem = only_problem(path)
    assert (problem.key, problem.hint) == ("batch.size", "It stands in line 2 already")
    assert problem.source == f"file {path}, line 3"


def test_a_merge_key_is_refused_with_the_reason(tmp_path: Path) -> None:
    problem = only_problem(a_file(tmp_path, "<<: {batch: {size: 1}}"))
    assert problem.hint == "Merge keys are not supported: write the keys out"


@pytest.mark.parametrize("text", ["null: 1", "[a]: 1", "{a: 1}: 2"])
def test_odd_keys_are_errors(tmp_path: Path, text: str) -> None:
    assert only_problem(a_file(tmp_path, text)).source.endswith("line 1")


FACTOR = "a number above 0 and up to 10000, with at most 6 decimals"
ENTRY = "a name of 1 to 127 characters without a comma"
TABLE_KEYS = "a mapping of the keys kind, schema, table, columns, statuses, events, maxPerPass"
NAME = "a Postgres name of 1 to 63 bytes, without quotes around it"


@pytest.mark.parametrize(
    ("text", "key", "allowed"),
    [
        ("batch: 5", "batch", "a mapping of the keys size, parallel"),
        ("batch: [5]", "batch", "a mapping of the keys size, parallel"),
        ("batch: {size: {rows: 5, more: 6}}", "batch.size", "a whole number from 1 to 100000 (rows)"),
        ("batch: {size: [5]}", "batch.size", "a whole number from 1 to 100000 (rows)"),
        ("batch: {size: ''}", "batch.size", "a whole number from 1 to 100000 (rows)"),
        ("tables: [jobs]", "tables", "a mapping of names"),
        ("tables: {}", "tables", "at least one table"),
        ("tables: {jobs: yes}", "tables.jobs", TABLE_KEYS),
        ("tables: {jobs: {kind: dual-record}}", "tables.jobs.kind", "only lease"),
        ("tables: {jobs: {table: ''}, b: {columns: {id: ''}}}", "tables.b.columns.id", NAME),
        ("stages: 6", "stages", "a mapping of names"),
        ("stages: {dub: }", "stages.dub.factor", FACTOR),
        ("stages: {dub: {}}", "stages.dub.factor", FACTOR),
        ("stages: {dub: fast}", "stages.dub.factor", FACTOR),
        ("stages: {'a,b': 3}", "stages.a,b", ENTRY),
        ("stages: {'': 3}", 'stages.""', ENTRY),
        ("liveness: {causes: {' x': {failAfter: 3}}}", 'liveness.causes." x"', ENTRY),
        ("liveness: {cluster: a/b}", "liveness.cluster", "a word without space, / or #"),
        (
            "metrics: {pushgatewayJob: a/b}",
            "metrics.pushgatewayJob",
            "a word of 1 to 200 characters without /",
        ),
    ],
)
def test_a_wrong_shape_says_what_shape_is_right(tmp_path: Path, text: str, key: str, allowed: str) -> None:
    problem = only_problem(a_file(tmp_path, text))
    assert (problem.key, problem.allowed) == (key, allowed)


@pytest.mark.parametrize(
    "patterns",
    [
        "[]",
        "['{namespace}']",
        "['{pod}/{pod}']",
        "['{pod']",
        "['{pod}', '{pod}']",
        "['{pod}{x}']",
        "['{pod}}']",
        "[1]",
        "x",
        "[{pod: }]",
    ],
)
def test_a_wrong_identity_pattern_is_an_error(tmp_path: Path, patterns: str) -> None:
    problem = only_problem(a_file(tmp_path, f"liveness: {{identityPatterns: {patterns}}}"))
    assert problem.key == "liveness.identityPatterns"
