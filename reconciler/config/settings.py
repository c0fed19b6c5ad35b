"""The effective configuration, whole: what the rest of the house is given.

Plain pydantic, not pydantic-settings: importing that cost 74 to 88 ms more than pydantic alone (three
measurements with bytecode; bare python 10, pydantic 77 to 84, pydantic-settings 2.16 152 to 171), in a
process that starts every minute, and it cannot say what this package exists to say. Its sources merge before
they validate, so a wrong value that another one hides goes unseen, a right one loses its origin, and a
variable that is only "the default of" a key cannot rank below the file.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from pydantic import Field, PrivateAttr

from reconciler import model
from reconciler.config.grammar import Flag
from reconciler.config.sections import (
    Attempts,
    Backoff,
    Batch,
    Brake,
    Database,
    DualRecord,
    Interval,
    Lease,
    Liveness,
    Log,
    Metrics,
    Stage,
    State,
    WorkerSection,
)
from reconciler.config.setting import Section, Setting
from reconciler.config.tables import JobTable

DEFAULT_TABLES: Final = ("jobs", "asr_jobs")
DEFAULT_FACTORS: Final = model.SlaPolicy().factors


def _tables() -> dict[str, JobTable]:
    return {name: JobTable(table=name) for name in DEFAULT_TABLES}


def _stages() -> dict[str, Stage]:
    return {name: Stage(factor=factor) for name, factor in DEFAULT_FACTORS.items()}


class Settings(Section):
    """The effective configuration: frozen, complete, each value valid."""

    tables: Mapping[str, JobTable] = Field(default_factory=_tables)
    stages: Mapping[str, Stage] = Field(default_factory=_stages)
    lease: Lease = Field(default_factory=Lease)
    attempts: Attempts = Field(default_factory=Attempts)
    backoff: Backoff = Field(default_factory=Backoff)
    liveness: Liveness = Field(default_factory=Liveness)
    brake: Brake = Field(default_factory=Brake)
    batch: Batch = Field(default_factory=Batch)
    interval: Interval = Field(default_factory=Interval)
    database: Database = Field(default_factory=Database)
    state: State = Field(default_factory=State)
    metrics: Metrics = Field(default_factory=Metrics)
    log: Log = Field(default_factory=Log)
    worker: WorkerSection = Field(default_factory=WorkerSection)
    dual_record: DualRecord = Field(default_factory=DualRecord)
    dry_run: Annotated[
        bool, Setting(Flag(), "say what would be done, do nothing", env=("REAPER_DRY_RUN",))
    ] = False

    _sources: Mapping[str, str] = PrivateAttr(default_factory=lambda: MappingProxyType({}))
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    # ── What the rest of the house asks for ─────────────────────────────────────────────────────────

    def policy(self) -> model.Policy:
        """All numbers the rules need."""
        return model.Policy(
            sla=model.SlaPolicy(
                default_lease_sec=self.lease.default_sec,
                factors=MappingProxyType({name: stage.factor for name, stage in self.stages.items()}),
            ),
            backoff=model.BackoffPolicy(
                steps_sec=self.backoff.steps_sec or model.BackoffPolicy().steps_sec,
                base_ms=self.backoff.base_ms,
                max_ms=self.backoff.max_ms,
            ),
            liveness=model.LivenessPolicy(
                defer_factor=self.liveness.defer_factor,
                defer_max_sec=self.liveness.defer_max_sec,
                clock_skew_sec=self.liveness.clock_skew_sec,
                max_holders=self.liveness.max_holders,
            ),
            brake=model.BrakePolicy(
                max_expired_share=self.brake.max_expired_share, outage_grace_sec=self.brake.outage_grace_sec
            ),
            max_attempts=self.attempts.max,
            lease_timeout_sec=self.lease_timeout_sec,
            heartbeat_sec=self.lease.heartbeat_sec,
            interval_sec=self.interval.sec,
            batch_size=self.batch.size,
        )

    def table_specs(self) -> tuple[model.TableSpec, ...]:
        """The tables to reap, in order."""
        return tuple(
            model.TableSpec(
                name=name,
                table=entry.table or name,
                schema=entry.schema_name,
                columns=model.Columns(**entry.columns.model_dump()),
                statuses=model.Statuses(**entry.statuses.model_dump()),
                events=model.EventsSpec(
                    table=entry.events.table,
                    schema=entry.events.schema_name,
                    job_id=entry.events.job_id,
                    data=entry.events.data,
                ),
                max_per_pass=entry.max_per_pass,
            )
            for name, entry in self.tables.items()
        )

    @property
    def sources(self) -> Mapping[str, str]:
        """Dotted key -> "default", "file <path>", "env NAME" or "flag"."""
        return self._sources

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but probably not meant."""
        return self._warnings

    @property
    def checksum(self) -> str:
        """sha256 of the effective values without secrets: equal wherever the reaper would act alike."""
        from reconciler.config.describe import checksum  # noqa: PLC0415 - describe imports this module

        return checksum(self)

    @property
    def dsn(self) -> str | None:
        """None: libpq's PG* variables."""
        return self.database.url

    @property
    def lease_timeout_sec(self) -> int:
        return self.lease.default_sec if self.lease.timeout_sec is None else self.lease.timeout_sec

    @property
    def interval_sec(self) -> float:
        return self.interval.sec

    @property
    def batch_size(self) -> int:
        return self.batch.size

    @property
    def parallel(self) -> int:
        return self.batch.parallel

    @property
    def liveness_mode(self) -> str:
        return self.liveness.mode

    @property
    def pod_namespace(self) -> str | None:
        return self.liveness.pod_namespace

    @property
    def metrics_port(self) -> int:
        return self.metrics.port

    @property
    def pushgateway_url(self) -> str | None:
        return self.metrics.pushgateway

    @property
    def pushgateway_job(self) -> str:
        return self.metrics.pushgateway_job

    @property
    def log_level(self) -> str:
        return self.log.level

    @property
    def ai_log_level(self) -> str:
        return self.log.ai_level

    @property
    def state_table(self) -> str:
        return self.state.table

    @property
    def state_schema(self) -> str | None:
        return self.state.schema_name

    @property
    def statement_timeout_ms(self) -> int:
        return self.database.statement_timeout_ms

    @property
    def lock_timeout_ms(self) -> int:
        return self.database.lock_timeout_ms

    @property
    def connect_timeout_sec(self) -> int:
        return self.database.connect_timeout_sec

    @property
    def max_concurrency(self) -> int:
        return self.worker.max_concurrency
