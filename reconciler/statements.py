"""From a table's shape to the statements of its pass: names and types filled in, once per pass.

Three scans find all rows that may need attention, each by an index of its own: leases that ran out,
leases too far ahead to be believed, rows without a lease whose last sign of life is old. All three feed
the same judging statement (sql/reap.sql). The prefilters here only keep healthy rows from being locked;
what happens to a row is decided in the statement alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from psycopg import sql

from reconciler.backoff import JITTER, ladder
from reconciler.model import UNKNOWN_RULE, Policy, Rule, Rulebook
from reconciler.report import Scan
from reconciler.shape import TableShape, qualified, type_name
from reconciler.sla import FAR_AHEAD_SEC, MAX_LEASE_SEC, UNSTAMPED_START_SEC
from reconciler.sql import escaped, query, trusted

EVIDENCE_SEC = 120
"""A statement acts only within this long of its evidence (LIVENESS.md, order of work, 5)."""

RECOVERY_BUCKETS_SEC = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the time-to-recover histogram: lease expiry to requeue."""


LOCK: Final = "FOR NO KEY UPDATE SKIP LOCKED"
"""The lock our UPDATE takes anyway, and no stronger: plain FOR UPDATE would skip a job as long as any open
transaction has inserted a row that refers to it, and a hung worker's own progress row would hide its job."""


KEY_LOCK: Final = "FOR UPDATE SKIP LOCKED"
"""Where a column we write is part of a unique key (a table partitioned by status), the UPDATE takes this."""

AGES = ("claimed_before_age", "other_beat_age", "min_silence_sec")

LONGEST_AGE_SEC = 1e11
"""Three thousand years. JSON has no infinity, and a clock set back further is no timestamp any more: the
rule of one holder whose last beat reads -infinity must not cost the whole table."""


class Statements:
    """The composed SQL of one table."""

    def __init__(self, shape: TableShape) -> None:
        self.shape = shape
        self._lock = sql.SQL(KEY_LOCK if shape.rewrites_key else LOCK)
        self._names = _names(shape)
        self._predicates = _predicates(self._names)
        self.survey = query("reap", "survey").format(**self._names, **self._predicates)
        self.processing_count = query("reap", "processing_count").format(**self._names)
        self.holders = query("reap", "holders").format(**self._names, **self._predicates)
        self.fleet = query("reap", "fleet").format(**self._names)

    def reap(
        self,
        scan: Scan,
        *,
        resume: bool = False,
        past_lease: bool = False,
        only: bool = False,
        per_holder: bool = True,
        detailed: bool = True,
        dry_run: bool = False,
    ) -> sql.Composed:
        """The batch statement; a dry run neither locks nor writes.

        `resume` continues after the last key, with `past_lease` after all rows of that lease.
        """
        names = self._names
        return query("reap", "reap").format(
            **names,
            **self._page(scan, resume=resume, past_lease=past_lease, only=only),
            lock=sql.SQL("") if dry_run else self._lock,
            rule=query("reap", "rule_per_holder" if per_holder else "rule_for_all").format(),
            touched=query("reap", "would_touch" if dry_run else "touched").format(**names),
            told=query("reap", "told_each" if detailed else "told_groups").format(**names),
        )

    def peek(
        self, scan: Scan, *, resume: bool, past_lease: bool = False, dry_run: bool = False
    ) -> sql.Composed:
        """The statement that reads the next row's key without judging it."""
        page = self._page(scan, resume=resume, past_lease=past_lease, raw=True)
        lock = sql.SQL("") if dry_run else self._lock
        return query("reap", "peek").format(**self._names, **page, lock=lock)

    def _page(
        self, scan: Scan, *, resume: bool, past_lease: bool, only: bool = False, raw: bool = False
    ) -> dict[str, sql.Composable]:
        names = self._names
        which = self._predicates[f"is_{scan}"]
        if only:
            which = sql.SQL("{which} AND {id} = %(only_id)s::{id_type}").format(which=which, **names)
        lease = names["lease"] if raw else sql.SQL("lease")
        row_id = names["id"] if raw else sql.SQL("id")
        if scan is Scan.STALE:  # the lease is NULL in all of them: the id alone orders
            edge: sql.Composable = sql.SQL("")
            up_to_edge: sql.Composable = sql.SQL("")
            edge_key = sql.SQL("NULL")
            after = sql.SQL("AND {id} > %(after_id)s::{id_type}" if resume else "").format(**names)
            # Named all the same, or a small page would be read off the primary key, past all finished rows.
            order = sql.SQL("{lease}, {id}").format(**names)
            last_key = sql.SQL("NULL, {id}::text").format(id=row_id)
            last_which = sql.SQL("")
        else:
            behind = "AND ({lease}, {id}) > (%(after_lease)s::timestamptz, %(after_id)s::{id_type})"
            if past_lease:
                behind = "AND {lease} > %(after_lease)s::timestamptz"
            after = trusted(behind if resume else "").format(**names)
            edge = query("reap", "edge").format(**names, which=which, after=after)
            up_to_edge = sql.SQL("AND {lease} <= coalesce((SELECT lease FROM edge), 'infinity')").format(
                **names
            )
            edge_key = sql.SQL("(SELECT to_jsonb(lease) FROM edge)")
            order = sql.SQL("{lease}, {id}").format(**names)
            last_key = sql.SQL("{lease}, {id}::text").format(lease=lease, id=row_id)
            # Two cheap looks instead of sorting a page that is already in order.
            last_which = sql.SQL("WHERE lease = (SELECT max(lease) FROM judged)")
        return {
            "which": which,
            "after": after,
            "edge": edge,
            "up_to_edge": up_to_edge,
            "edge_key": edge_key,
            "order": order,
            "last_key": last_key,
            "last_which": last_which,
        }


def policy_parameters(policy: Policy, shape: TableShape) -> dict[str, Any]:
    """The numbers of the policy, as the statements name them."""
    return {
        "default_lease_sec": policy.sla.default_lease_sec,
        "factors": json.dumps({stage: str(factor) for stage, factor in policy.sla.factors.items()}),
        "max_lease_sec": MAX_LEASE_SEC,
        "far_sec": FAR_AHEAD_SEC,
        "lease_timeout_sec": float(policy.lease_timeout_sec),
        "start_stale_sec": float(UNSTAMPED_START_SEC),
        "defer_factor": float(policy.liveness.defer_factor),
        "defer_max_sec": float(policy.liveness.defer_max_sec),
        "dropped_after_sec": 2.0 * policy.heartbeat_sec,
        "max_attempts": policy.max_attempts,
        "attempt_ceiling": shape.attempt_ceiling,
        "ladder": list(ladder(policy.backoff)),
        "jitter": JITTER,
        "buckets": list(RECOVERY_BUCKETS_SEC),
        "evidence_sec": float(EVIDENCE_SEC),
    }


def asks_holders(rulebook: Rulebook) -> bool:
    """Whether the rule differs between holders at all; if not, the statement spares itself the look-up."""
    return bool(rulebook.holders) or rulebook.default != UNKNOWN_RULE


def rule_parameters(rulebook: Rulebook) -> dict[str, Any]:
    """The holders' rules, looked up by the statement with `rules -> locked_by`."""
    hold = rulebook.grace_sec == float("inf")
    return {
        "rules": json.dumps({holder: _rule(rule) for holder, rule in rulebook.holders.items()}),
        "default_rule": None if rulebook.default is None else json.dumps(_rule(rulebook.default)),
        "unknown_rule": json.dumps(_rule(UNKNOWN_RULE)),
        "hold": hold,
        "grace_sec": 0.0 if hold else float(rulebook.grace_sec),
    }


def _rule(rule: Rule) -> Mapping[str, Any]:
    given = {key: value for key, value in asdict(rule).items() if value is not None}
    return given | {key: _bounded(given[key]) for key in AGES if key in given}


def _bounded(age: float) -> float:
    return min(max(age, -LONGEST_AGE_SEC), LONGEST_AGE_SEC)


def _names(shape: TableShape) -> Mapping[str, sql.Composable]:
    spec, columns = shape.spec, shape.spec.columns
    names: dict[str, sql.Composable] = {
        "table": qualified(spec.schema, spec.table),
        "name": sql.Literal(spec.name),
        "id": sql.Identifier(columns.id),
        "status": sql.Identifier(columns.status),
        "locked_by": sql.Identifier(columns.locked_by),
        "lease": sql.Identifier(columns.lease_expires_at),
        "beat": sql.Identifier(columns.last_heartbeat_at),
        "start": sql.Identifier(columns.processing_started_at),
        "due": sql.Identifier(columns.next_earliest_run_at),
        "attempt": sql.Identifier(columns.attempt_count),
        "refunded": sql.Identifier(columns.attempts_refunded),
        "max_attempts": sql.Identifier(columns.max_attempts) if shape.has_max_attempts else sql.SQL("NULL"),
        "stage": sql.Identifier(columns.stage),
        "expected_ms": sql.Identifier(columns.expected_duration_ms),
        "fail_code": sql.Identifier(columns.fail_code),
        "fail_reason": sql.Identifier(columns.fail_reason),
        # Words of the app's vocabulary as literals, not parameters: a partial index on
        # status = 'processing' is only used when the planner can see the word.
        "queued": sql.Literal(spec.statuses.queued),
        "processing": sql.Literal(spec.statuses.processing),
        "failed": sql.Literal(spec.statuses.failed),
        "id_type": type_name(shape.id_type),
        "status_type": type_name(shape.status_type),
        "attempt_type": type_name(shape.attempt_type),
        "events": qualified(spec.events.schema, spec.events.table),
        "event_job_id": sql.Identifier(spec.events.job_id),
        "event_data": sql.Identifier(spec.events.data),
        "event_job_id_type": type_name(shape.job_id_type),
        "event_data_type": type_name(shape.data_type),
    }
    return {role: escaped(part) for role, part in names.items()} | {"event": query("reap", "event")}


def _predicates(names: Mapping[str, sql.Composable]) -> dict[str, sql.Composable]:
    """The three scans' conditions, and what counts as unleased: only counted, never locked."""
    as_of = "coalesce(%(as_of)s::timestamptz, statement_timestamp())"
    a_day_ahead = f"({as_of} + make_interval(secs => %(far_sec)s))"
    beaten = "CASE WHEN {beat} <= " + a_day_ahead + " THEN {beat} END"
    started = "CASE WHEN {start} <= " + a_day_ahead + " THEN {start} END"
    sign = f"coalesce({beaten}, {started})"
    timeout = "make_interval(secs => %(lease_timeout_sec)s)"
    earlier_run = "coalesce({lease} < " + f"{started}, false)"
    far = "{lease} > " + a_day_ahead
    stage_lease = "ceil({expected_ms} * (%(factors)s::jsonb ->> {stage}::text)::numeric * 0.001)"
    stage_lease = f"least(greatest(%(default_lease_sec)s, {stage_lease}), %(max_lease_sec)s)::float8"
    beyond_stage = "{lease} > " + f"{as_of} + make_interval(secs => 2 * {stage_lease})"
    texts = {
        # A row whose lease is an earlier run's is judged by its beat; while that is fresh it is healthy.
        "is_expired": "{lease} < " + as_of + f" AND NOT ({earlier_run} AND {sign} >= {as_of} - {timeout})",
        "is_far": far + f" AND {sign} < {as_of} - make_interval(secs => %(default_lease_sec)s)",
        "is_stale": "{lease} IS NULL AND " + f"{sign} < {as_of} - {timeout}",
        "is_unstamped": "{lease} IS NULL AND " + f"{sign} IS NULL",
        # The first half is found by the index, the second asks what the stage's own lease is.
        "is_far_unstamped": far + f" AND {sign} IS NULL AND {beyond_stage}",
    }
    return {name: trusted(text).format(**names) for name, text in texts.items()}
