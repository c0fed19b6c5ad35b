"""The sections of the file: every key with its default, its bounds, its variables and its meaning."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, ClassVar

from pydantic import Field

from reconciler.config.grammar import (
    TEN_YEARS_SEC,
    Choice,
    Dsn,
    Factor,
    Flag,
    Ladder,
    Name,
    Namespace,
    Number,
    Patterns,
    Text,
    Url,
    Whole,
)
from reconciler.config.setting import Section, Setting

_DURATION = Whole(1, TEN_YEARS_SEC, "seconds, at most ten years")
_DURATION_MS = Whole(1, TEN_YEARS_SEC * 1000, "milliseconds, at most ten years")
_TIMEOUT_MS = Whole(1, 86_400_000, "milliseconds, at most a day")
_LEVEL = Choice(("debug", "info", "warn", "error"), (("warning", "warn"),))
_CLUSTER = Text("a word without space, / or #", most=253, forbidden="/# ")


class Stage(Section):
    shorthand: ClassVar[str | None] = "factor"
    factor: Annotated[
        Decimal, Setting(Factor(), "lease = factor x expected duration, at least lease.defaultSec")
    ]


class Lease(Section):
    default_sec: Annotated[
        int,
        Setting(
            _DURATION,
            "shortest lease, and the lease of jobs without stage or duration",
            env=("DEFAULT_LEASE_SEC",),
            fallback=("QUEUE_VISIBILITY_SEC",),
        ),
    ] = 300
    heartbeat_sec: Annotated[
        int,
        Setting(
            _DURATION,
            "time between two beats; at most a third of lease.defaultSec, above 15 warns",
            env=("HEARTBEAT_SEC", "HEARTBEAT_INTERVAL_SEC"),
        ),
    ] = 15
    timeout_sec: Annotated[
        int | None,
        Setting(
            _DURATION,
            "silence after which a job without lease is stale; null: lease.defaultSec",
            env=("LEASE_TIMEOUT_SEC",),
            nullable=True,
        ),
    ] = None


class Attempts(Section):
    max: Annotated[
        int,
        Setting(
            Whole(1, 1000),
            "attempts where the row's own max_attempts is NULL or absent",
            env=("JOB_MAX_ATTEMPTS",),
            fallback=("QUEUE_MAX_ATTEMPTS", "MAX_ATTEMPTS"),
        ),
    ] = 3


class Backoff(Section):
    steps_sec: Annotated[
        tuple[float, ...] | None,
        Setting(Ladder(), "waits after the 1st, 2nd, … attempt; the last repeats", nullable=True),
    ] = (30.0, 120.0, 600.0)
    base_ms: Annotated[
        int | None,
        Setting(
            _DURATION_MS,
            "base x 2^(n-1) instead of stepsSec; 30000 where only maxMs is set",
            env=("JOB_RETRY_BACKOFF_MS_BASE", "QUEUE_RETRY_BACKOFF_MS_BASE"),
            nullable=True,
        ),
    ] = None
    max_ms: Annotated[
        int | None,
        Setting(
            _DURATION_MS,
            "its cap; 600000 where only baseMs is set",
            env=("JOB_RETRY_BACKOFF_MS_MAX", "QUEUE_RETRY_BACKOFF_MS_MAX"),
            nullable=True,
        ),
    ] = None


class Cause(Section):
    counts_attempt: Annotated[bool, Setting(Flag(), "whether such a death burns an attempt")] = True
    fail_after: Annotated[
        int | None,
        Setting(Whole(1, 1000, "deaths"), "fail the job after this many; null: never early", nullable=True),
    ] = None


class Liveness(Section):
    mode: Annotated[
        str,
        Setting(
            Choice(("auto", "kubernetes", "off")),
            "whether pods are asked before a job is touched; auto: inside a cluster",
            env=("REAPER_LIVENESS",),
        ),
    ] = "auto"
    defer_factor: Annotated[
        float,
        Setting(Number(Decimal(0), Decimal(100)), "a running pod spares its job for stage lease x this"),
    ] = 1.0
    defer_max_sec: Annotated[
        int, Setting(Whole(0, TEN_YEARS_SEC, "seconds"), "but for no longer than this after the expiry")
    ] = 900
    clock_skew_sec: Annotated[
        int, Setting(Whole(0, 3600, "seconds"), "how far the clocks of Postgres and Kubernetes may differ")
    ] = 120
    max_holders: Annotated[int, Setting(Whole(1, 1_000_000), "holders asked about in one pass")] = 2000
    pod_selector: Annotated[str, Setting(Text(), "label selector for lists of pods")] = ""
    cluster: Annotated[str, Setting(_CLUSTER, "our cluster's name in `locked_by`")] = ""
    pod_namespace: Annotated[
        str | None,
        Setting(
            Namespace(),
            "namespace of pods whose identity does not name it",
            env=("REAPER_POD_NAMESPACE",),
            nullable=True,
        ),
    ] = None
    trust_not_found: Annotated[
        bool, Setting(Flag(), "outside a cluster, let a reviewed 404 count as dead")
    ] = False
    identity_patterns: Annotated[
        tuple[str, ...], Setting(Patterns(), "older forms of `locked_by`, first match wins")
    ] = ("{namespace}/{pod}", "{pod}")
    causes: Mapping[str, Cause] = Field(default_factory=dict)
    refund_budget: Annotated[int, Setting(Whole(0, 1000), "refunds one job may get")] = 5


class Brake(Section):
    max_expired_share: Annotated[
        float,
        Setting(
            Number(Decimal("0.000001"), Decimal(1)), "above this share of expired jobs a table is left alone"
        ),
    ] = 1.0
    outage_grace_sec: Annotated[
        int, Setting(Whole(0, 86_400, "seconds"), "patience with a silent fleet; 0: off")
    ] = 0


class Batch(Section):
    size: Annotated[
        int, Setting(Whole(1, 100_000, "rows"), "rows in one transaction", env=("REAPER_BATCH_SIZE",))
    ] = 5000
    parallel: Annotated[int, Setting(Whole(1, 16), "tables at once", env=("REAPER_PARALLEL",))] = 2


class Interval(Section):
    sec: Annotated[
        float,
        Setting(
            Number(Decimal("0.1"), Decimal(86_400), "seconds"),
            "time between two passes, ± 10 %",
            env=("REAPER_INTERVAL_SEC", "RECOVERY_SCAN_INTERVAL_SEC"),
        ),
    ] = 60.0


class Database(Section):
    url: Annotated[
        str | None,
        Setting(
            Dsn(),
            "the database; null: libpq's PG* variables. Comes from a Secret, never from the file",
            env=("DATABASE_URL",),
            nullable=True,
            secret=True,
            in_file=False,
        ),
    ] = Field(default=None, repr=False)
    statement_timeout_ms: Annotated[int, Setting(_TIMEOUT_MS, "longest statement")] = 30_000
    lock_timeout_ms: Annotated[int, Setting(_TIMEOUT_MS, "longest wait for a lock")] = 2000
    connect_timeout_sec: Annotated[int, Setting(Whole(1, 3600, "seconds"), "longest connect")] = 10


class State(Section):
    schema_name: Annotated[
        str | None, Setting(Name(), "schema of the state table; null: search_path", nullable=True)
    ] = Field(default=None, alias="schema")
    table: Annotated[str, Setting(Name(), "where counters and the pass's own lease are kept")] = (
        "reaper_state"
    )


class Metrics(Section):
    port: Annotated[
        int,
        Setting(Whole(0, 65_535), "/metrics and /healthz; 0: any free port", env=("REAPER_METRICS_PORT",)),
    ] = 8080
    pushgateway: Annotated[
        str | None,
        Setting(
            Url(),
            "where `once` pushes its metrics",
            env=("REAPER_PUSHGATEWAY_URL",),
            nullable=True,
            secret=True,
        ),
    ] = Field(default=None, repr=False)
    pushgateway_job: Annotated[
        str,
        Setting(
            Text("a word of 1 to 200 characters without /", least=1, most=200, forbidden="/"),
            "the job label of what is pushed",
            env=("REAPER_PUSHGATEWAY_JOB",),
        ),
    ] = "job-reaper"


class Log(Section):
    level: Annotated[str, Setting(_LEVEL, "the least level that is written", env=("REAPER_LOG_LEVEL",))] = (
        "info"
    )
    ai_level: Annotated[str, Setting(_LEVEL, "the same for the log tag `AI`", env=("AI_LOG_LEVEL",))] = "warn"


class WorkerSection(Section):
    max_concurrency: Annotated[
        int,
        Setting(
            Whole(1, 10_000),
            "jobs one worker runs at once",
            env=("MAX_CONCURRENCY",),
            fallback=("PGBOSS_TEAM_SIZE",),
        ),
    ] = 5
    scratch_dir: Annotated[
        str | None,
        Setting(
            Text("a path of up to 1000 characters"),
            "where workers keep unfinished output; null: the system's temporary directory",
            env=("SCRATCH_DIR",),
            nullable=True,
        ),
    ] = None


class DualRecord(Section):
    """What pg-boss does where a table does not say so itself."""

    retry_limit: Annotated[
        int, Setting(Whole(0, 1000), "retries pg-boss makes", fallback=("PGBOSS_RETRY_LIMIT",))
    ] = 3
    retry_delay_sec: Annotated[
        int,
        Setting(Whole(0, TEN_YEARS_SEC, "seconds"), "wait before a retry", fallback=("PGBOSS_RETRY_DELAY",)),
    ] = 60
    retry_backoff: Annotated[
        bool, Setting(Flag(), "whether that wait doubles", fallback=("PGBOSS_RETRY_BACKOFF",))
    ] = True
    expire_in_sec: Annotated[
        int, Setting(_DURATION, "time budget of a job", fallback=("PGBOSS_EXPIRE_IN_SECONDS",))
    ] = 3600
