"""The sections of one job table: where it lives and what its app calls things."""

from typing import Annotated

from pydantic import Field

from reconciler.config.grammar import Choice, Name, Text, Whole
from reconciler.config.setting import Section, Setting

_STATUS = Text("a word of 1 to 200 characters", least=1, most=200)


class ColumnNames(Section):
    """The app's names for the columns (`model.Columns`, field by field)."""

    id: Annotated[str, Setting(Name(), "the primary key: uuid, bigint or text")] = "id"
    status: Annotated[str, Setting(Name(), "the state of the job")] = "status"
    locked_by: Annotated[str, Setting(Name(), "the holder")] = "locked_by"
    lease_expires_at: Annotated[str, Setting(Name(), "when the lease ends")] = "lease_expires_at"
    last_heartbeat_at: Annotated[str, Setting(Name(), "the last beat")] = "last_heartbeat_at"
    processing_started_at: Annotated[str, Setting(Name(), "when it was claimed")] = "processing_started_at"
    attempt_count: Annotated[str, Setting(Name(), "claims so far, the fencing token")] = "attempt_count"
    attempts_refunded: Annotated[str, Setting(Name(), "claims that do not count")] = "attempts_refunded"
    max_attempts: Annotated[str, Setting(Name(), "attempts allowed for this row")] = "max_attempts"
    fail_code: Annotated[str, Setting(Name(), "the word for the failure")] = "fail_code"
    fail_reason: Annotated[str, Setting(Name(), "the failure in detail")] = "fail_reason"
    stage: Annotated[str, Setting(Name(), "the stage, which picks the SLA factor")] = "stage"
    next_earliest_run_at: Annotated[str, Setting(Name(), "not to be claimed before")] = "next_earliest_run_at"
    expected_duration_ms: Annotated[str, Setting(Name(), "how long the stage should take")] = (
        "expected_duration_ms"
    )


class StatusWords(Section):
    """The app's words for the four states."""

    queued: Annotated[str, Setting(_STATUS, "waits for a worker")] = "queued"
    processing: Annotated[str, Setting(_STATUS, "is held by a worker")] = "processing"
    done: Annotated[str, Setting(_STATUS, "finished")] = "done"
    failed: Annotated[str, Setting(_STATUS, "given up")] = "failed"


class EventsTable(Section):
    """Where this table's events are written."""

    schema_name: Annotated[
        str | None, Setting(Name(), "schema of the events table; null: search_path", nullable=True)
    ] = Field(default=None, alias="schema")
    table: Annotated[str, Setting(Name(), "the events table")] = "job_events"
    job_id: Annotated[str, Setting(Name(), "its column for the job's id")] = "job_id"
    data: Annotated[str, Setting(Name(), "its jsonb column for the event")] = "data"


class JobTable(Section):
    """One job table. Its key in the file is the word used in events, metrics and JSON."""

    kind: Annotated[str, Setting(Choice(("lease",)), "how jobs of this table are held")] = "lease"
    schema_name: Annotated[
        str | None,
        Setting(
            Name(),
            "schema of the table; null: search_path, or what the key says before its dot",
            nullable=True,
        ),
    ] = Field(default=None, alias="schema")
    table: Annotated[
        str | None,
        Setting(Name(), "the table; null: the key, or what the key says after its dot", nullable=True),
    ] = None
    columns: ColumnNames = Field(default_factory=ColumnNames)
    statuses: StatusWords = Field(default_factory=StatusWords)
    events: EventsTable = Field(default_factory=EventsTable)
    max_per_pass: Annotated[
        int | None,
        Setting(
            Whole(1, 1_000_000_000, "rows"), "rows changed in one pass at most; null: no limit", nullable=True
        ),
    ] = None
