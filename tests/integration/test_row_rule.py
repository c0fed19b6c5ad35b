"""The row rule exists twice: as SQL, which acts, and as a pure model, which explains. They must agree.

Hundreds of random rows at a time are judged by both under a clock that stands still. Whatever the
statement did to a row, said about it in its event and counted must be what the model decided.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.rows import dict_row

from reconciler.database import Database
from reconciler.decide import Kind, decide, judged_stamp
from reconciler.model import (
    UNKNOWN_RULE,
    Decision,
    EventType,
    Job,
    Mode,
    Outcome,
    Policy,
    Reason,
    Rule,
    Rulebook,
    TableSpec,
    Verdict,
)
from reconciler.report import Page, PageRequest, Scan, Survey
from reconciler.shape import read_shape
from reconciler.statements import EVIDENCE_SEC, Statements, policy_parameters
from reconciler.store import PgStore
from tests.integration.row_rule_cases import (
    CLOCK,
    NOW,
    Row,
    Stamp,
    at_age,
    frozen_dsn,
    insert,
    older_by,
    policies,
    random_rows,
    rulebooks,
)
from tests.postgres import Connection

ROWS = 250
SPEC = TableSpec("jobs", "jobs")
CHANGED = (Outcome.REQUEUED, Outcome.FAILED)
BEFORE = sql.SQL(
    "select id, status, locked_by, attempt_count, max_attempts, stage, fail_code, fail_reason,"
    " next_earliest_run_at::text as due,"
    " to_jsonb(lease_expires_at) as lease, to_jsonb(last_heartbeat_at) as beat,"
    " to_jsonb(processing_started_at) as start from jobs"
)


class Bench:
    """One database whose sessions see a clock that stands at `NOW` (or a little before, for the survey)."""

    def __init__(self, dsn: str, conn: Connection) -> None:
        self._dsn = dsn
        self.conn = conn
        self._databases: dict[datetime, Database] = {}
        conn.execute(sql.SQL(CLOCK))
        for column in ("attempt_count", "attempts_refunded", "max_attempts"):  # an app's own may be NULL
            conn.execute(sql.SQL("alter table jobs alter {} drop not null").format(sql.Identifier(column)))
        self.shape = read_shape(conn, SPEC)

    def store(self, policy: Policy, at: datetime = NOW) -> PgStore:
        if at not in self._databases:
            self._databases[at] = Database(frozen_dsn(self._dsn, at))
        return PgStore(self._databases[at], self.shape, policy)

    def fill(self, rows: list[Row]) -> dict[UUID, dict[str, Any]]:
        self.conn.execute("truncate jobs, job_events")
        insert(self.conn, rows)
        return self.read()

    def read(self) -> dict[UUID, dict[str, Any]]:
        with self.conn.cursor(row_factory=dict_row) as cursor:
            return {row["id"]: row for row in cursor.execute(BEFORE)}

    def events(self) -> dict[UUID, dict[str, Any]]:
        rows = self.conn.execute("select job_id, data from job_events").fetchall()
        assert len({job_id for job_id, _ in rows}) == len(rows), "one change wrote two events"
        return {UUID(job_id): data for job_id, data in rows}

    def in_reach(self, scan: Scan, policy: Policy, as_of: str) -> set[UUID]:
        """The rows a scan looks at: its own prefilter, asked alone."""
        which = Statements(self.shape)._predicates[f"is_{scan}"]
        statement = sql.SQL("select id from jobs where status = 'processing' and {}").format(which)
        parameters = policy_parameters(policy, self.shape) | {"as_of": as_of}
        return {row[0] for row in self.conn.execute(statement, parameters)}

    def close(self) -> None:
        for database in self._databases.values():
            database.close()


@pytest.fixture
def bench(dsn: str) -> Iterator[Bench]:
    with psycopg.connect(frozen_dsn(dsn, NOW), autocommit=True) as connection:
        made = Bench(dsn, connection)
        yield made
        made.close()


@dataclass
class Swept:
    """What a whole pass said, page by page."""

    judged: Counter[str] = field(default_factory=Counter)
    deferred: set[UUID] = field(default_factory=set)
    pages: list[Page] = field(default_factory=list)


def sweep(
    store: PgStore, rulebook: Rulebook, as_of: str, *, limit: int, detailed: bool, dry_run: bool
) -> Swept:
    """All pages of all scans, as the pass asks for them."""
    swept = Swept()
    for scan in Scan:
        request = PageRequest(
            scan, as_of, limit=limit, detailed=detailed, deferred_detail=10**6, dry_run=dry_run
        )
        while True:
            page = store.reap(request, rulebook)
            swept.pages.append(page)
            swept.judged.update(page.judged)
            swept.deferred.update(UUID(str(row_id)) for row_id in page.deferred)
            if page.rows < limit:
                break
            request = replace(request, after=page.last_key)
    return swept


def seen_later(rulebook: Rulebook, seconds: float) -> Rulebook:
    """Rules speak of ages before the evidence; the model wants them before now."""

    def shift(rule: Rule) -> Rule:
        return replace(
            rule,
            claimed_before_age=_plus(rule.claimed_before_age, seconds),
            other_beat_age=_plus(rule.other_beat_age, seconds),
        )

    return replace(
        rulebook,
        holders={holder: shift(rule) for holder, rule in rulebook.holders.items()},
        default=None if rulebook.default is None else shift(rulebook.default),
    )


def _plus(age: float | None, seconds: float) -> float | None:
    return None if age is None else age + seconds


def the_verdict(row: Row, rulebook: Rulebook, decision: Decision) -> tuple[str, object]:
    """Verdict and pod as the event must tell them."""
    job = row.job
    rule = UNKNOWN_RULE if job.locked_by is None else rulebook.holders.get(job.locked_by, rulebook.default)
    assert rule is not None
    if (
        rule.claimed_before_age is not None
        and job.start_age is not None
        and job.start_age > rule.claimed_before_age
    ):
        return Verdict.DEAD_INFERRED, rule.pod
    return (Verdict.DROPPED if decision.reason is Reason.DROPPED else rule.verdict), rule.pod


def check_change(
    row: Row,
    was: dict[str, Any],
    is_: dict[str, Any],
    event: dict[str, Any],
    decision: Decision,
    policy: Policy,
) -> None:
    """One changed row, its event and the model's decision."""
    failed = decision.outcome is Outcome.FAILED
    assert is_["status"] == ("failed" if failed else "queued")
    assert (is_["locked_by"], is_["lease"], is_["beat"], is_["start"]) == (None, None, None, None)
    assert is_["attempt_count"] == decision.attempt_after
    assert (is_["fail_code"], is_["fail_reason"]) == (decision.fail_code, decision.fail_reason)
    assert set(event) == {"type", "table", "details", "at"}
    assert (event["type"], event["table"]) == (decision.event, "jobs")
    assert datetime.fromisoformat(event["at"]) == NOW
    details = event["details"]
    limit = policy.max_attempts if was["max_attempts"] is None else was["max_attempts"]
    backoff = details.pop("backoff_sec")
    details.pop("verdict"), details.pop("pod")
    assert details == {
        "reason": decision.reason,
        "locked_by": was["locked_by"],
        "attempt": was["attempt_count"],
        "max_attempts": limit,
        "stage": was["stage"],
        "lease_expires_at": was["lease"],
        "last_heartbeat_at": was["beat"],
        "processing_started_at": was["start"],
        "fail_code": decision.fail_code,
    }
    if failed:
        assert backoff is None
        assert decision.backoff_sec is None
        assert is_["due"] == was["due"]
    else:
        assert decision.backoff_sec is not None
        assert decision.backoff_sec - 1e-9 <= backoff <= 1.1 * decision.backoff_sec + 1e-9
        due = datetime.fromisoformat(is_["due"])
        assert abs(due - (NOW + timedelta(seconds=backoff))) <= timedelta(microseconds=1)


def check_told(page: Page, decisions: dict[UUID, Decision], *, detailed: bool) -> Counter[tuple[str, str]]:
    """What the page tells agrees with itself and with the decisions; the sums by outcome and reason."""
    told: Counter[tuple[str, str]] = Counter()
    for group in page.groups:
        told[group.outcome, group.reason] += group.n
    if detailed:
        assert not page.holders
        for change in page.changes:
            decision = decisions[UUID(str(change.id))]
            assert (change.outcome, change.reason, change.event, change.fail_code) == (
                decision.outcome,
                decision.reason,
                decision.event,
                decision.fail_code,
            )
    else:
        by_holder: Counter[tuple[str, str]] = Counter()
        for holder in page.holders:
            by_holder[holder.outcome, holder.reason] += holder.n
        assert by_holder == told
        assert not page.changes
    return told


@pytest.mark.every_postgres
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # the message names the one row: nothing to shrink
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    policy=policies,
    rulebook=rulebooks,
    seed=st.integers(0, 2**32),
    waited=st.sampled_from([0.0, 0.0, 1.0, 60.0, EVIDENCE_SEC - 1e-6]),
    limit=st.sampled_from([7, 100, 10_000]),
    detailed=st.booleans(),
)
def test_the_statement_does_to_each_row_what_the_model_decides(
    bench: Bench, policy: Policy, rulebook: Rulebook, seed: int, waited: float, limit: int, detailed: bool
) -> None:
    rows = random_rows(seed, ROWS, policy, rulebook)
    before = bench.fill(rows)
    survey = bench.store(policy, NOW - timedelta(seconds=waited)).survey()
    decisions = {row.id: decide(row.job, seen_later(rulebook, waited), policy) for row in rows}
    reach = {scan: bench.in_reach(scan, policy, survey.as_of) for scan in Scan}
    seen = set[UUID]().union(*reach.values())
    check_survey(survey, reach, rows, policy, waited)
    check_unseen([row for row in rows if row.id not in seen], policy, waited)

    store = bench.store(policy)
    dry = sweep(store, rulebook, survey.as_of, limit=limit, detailed=detailed, dry_run=True)
    assert bench.read() == before
    assert bench.events() == {}
    swept = sweep(store, rulebook, survey.as_of, limit=limit, detailed=detailed, dry_run=False)
    assert (dry.judged, dry.deferred) == (swept.judged, swept.deferred)

    after, events = bench.read(), bench.events()
    for row in rows:
        decision = decisions[row.id]
        changed = row.id in seen and decision.outcome in CHANGED
        shown = (
            f"{row}\nwas {before[row.id]}\nis {after[row.id]}\nevent {events.get(row.id)}\nmodel {decision}"
        )
        assert (after[row.id] != before[row.id]) == changed, shown
        assert (row.id in events) == changed, shown
        assert (row.id in swept.deferred) == (row.id in seen and decision.outcome is Outcome.DEFERRED), shown
        if changed:
            details = events[row.id]["details"]
            verdict = the_verdict(row, seen_later(rulebook, waited), decision)
            assert (details["verdict"], details["pod"]) == verdict, shown
            try:
                check_change(row, before[row.id], after[row.id], events[row.id], decision, policy)
            except AssertionError as error:
                error.add_note(shown)
                raise
    assert swept.judged == Counter(decisions[row_id].outcome for row_id in seen)
    told = sum((check_told(page, decisions, detailed=detailed) for page in swept.pages), Counter())
    assert told == Counter(
        (decisions[row_id].outcome, decisions[row_id].reason)
        for row_id in seen
        if decisions[row_id].outcome in CHANGED
    )


def check_survey(
    survey: Survey, reach: dict[Scan, set[UUID]], rows: list[Row], policy: Policy, waited: float
) -> None:
    """The survey counts what the scans will look at, each row in one scan only, and what cannot be judged."""
    assert {scan: survey.count(scan) for scan in Scan} == {scan: len(ids) for scan, ids in reach.items()}
    assert survey.candidates == len(set[UUID]().union(*reach.values()))
    unstamped = [
        row
        for row in rows
        if decide(older_by(row.job, -waited), Rulebook(), policy).outcome is Outcome.UNLEASED
    ]
    assert survey.unleased == len(unstamped)


def check_unseen(rows: list[Row], policy: Policy, waited: float) -> None:
    """What no scan returns was healthy, or without any stamp, when the survey was taken."""
    for row in rows:
        outcome = decide(older_by(row.job, -waited), Rulebook(), policy).outcome
        assert outcome in (Outcome.LIVE, Outcome.UNLEASED), f"no scan finds {row}"


def test_the_random_rows_reach_every_outcome_reason_and_event() -> None:
    """Two judges that agree about nothing but live rows would prove nothing."""
    rulebook = Rulebook(
        {
            "h0": Rule(Verdict.DEAD_CONFIRMED, Mode.NOW),
            "h1": Rule(Verdict.DEAD_INFERRED, Mode.NOW, min_silence_sec=60.0),
            "h2": Rule(Verdict.ALIVE, Mode.CAPPED, claimed_before_age=500.0),
            "h3": Rule(Verdict.ALIVE, Mode.CAPPED, other_beat_age=10.0),
        },
        default=None,
    )
    policy = Policy()
    rows = random_rows(1, 4000, policy, rulebook)
    decisions = [decide(row.job, rulebook, policy) for row in rows]
    assert {decision.outcome for decision in decisions} == set(Outcome)
    assert {decision.reason for decision in decisions} == {None, *Reason}
    assert {decision.event for decision in decisions} == {None, *EventType}
    kinds = Counter(judged_stamp(row.job, policy, 300).kind for row in rows)
    assert all(kinds[kind] > 100 for kind in Kind)
    # Rows that a scan returns although they have not expired: a start past the timeout, within its hour.
    early = [
        decision.reason is Reason.POD_DEAD
        for row, decision in zip(rows, decisions, strict=True)
        if row.lease.text is None and row.beat.text is None and 300 < (row.start.age or 0) <= 3600
    ]
    assert any(early)


# ── the edges that random rows do not reach ─────────────────────────────────────────────────────────


def a_row(job: Job) -> Row:
    def stamp(age: float | None) -> Stamp:
        return Stamp() if age is None else at_age(round(age * 1e6))

    return Row(
        uuid4(), stamp(job.lease_age), stamp(job.beat_age), stamp(job.start_age), stamp(job.due_age), job
    )


def one_pass(
    bench: Bench, rows: list[Row], rulebook: Rulebook, policy: Policy, as_of: str | None = None
) -> Swept:
    bench.fill(rows)
    store = bench.store(policy)
    when = as_of or store.survey().as_of
    return sweep(store, rulebook, when, limit=100, detailed=True, dry_run=False)


@pytest.mark.every_postgres
def test_evidence_of_two_minutes_ago_moves_nothing(bench: Bench) -> None:
    rows = [a_row(Job(lease_age=600.0)), a_row(Job(beat_age=4000.0)), a_row(Job(-1e6, 4000.0))]
    before = bench.fill(rows)
    for seconds, fresh in ((EVIDENCE_SEC - 0.000001, True), (EVIDENCE_SEC, False), (3600, False)):
        as_of = (NOW - timedelta(seconds=seconds)).isoformat()
        for dry_run in (True, False):
            for scan in Scan:
                if fresh and not dry_run:
                    continue
                page = bench.store(Policy()).reap(
                    PageRequest(scan, as_of, limit=10, dry_run=dry_run), Rulebook()
                )
                assert page.fresh is fresh
                assert page.rows == (1 if fresh else 0)
    assert bench.read() == before


@pytest.mark.parametrize("age", [math.inf, -math.inf, 1e15, -1e15], ids=["inf", "-inf", "1e15", "-1e15"])
@pytest.mark.parametrize("field_name", ["claimed_before_age", "other_beat_age", "min_silence_sec"])
def test_no_age_in_a_rule_is_too_large_for_the_statement(bench: Bench, field_name: str, age: float) -> None:
    """A holder whose last beat was '-infinity' has an infinite age: its rule must not cost the table."""
    ages: dict[str, Any] = {field_name: age}
    early = field_name == "min_silence_sec"
    rule = Rule(Verdict.ALIVE, Mode.NOW if early else Mode.CAPPED, **ages)
    rulebook, policy = Rulebook({"h0": rule}, default=None), Policy()
    jobs = [
        Job(lease_age, beat_age, start_age, locked_by="h0")
        for lease_age in (100.0, 1000.0)
        for beat_age in (None, 5.0, 1500.0)
        for start_age in (None, 2000.0)
    ]
    # Seen by a scan though not expired: the only rows on which the silence is asked for.
    jobs.append(Job(-1e7, 1500.0, stage="clip", expected_duration_ms=1_000_000, locked_by="h0"))
    swept = one_pass(bench, [a_row(job) for job in jobs], rulebook, policy)
    assert swept.judged == Counter(decide(job, rulebook, policy).outcome for job in jobs)


@pytest.mark.parametrize(("column_type", "ceiling"), [("smallint", 2**15 - 1), ("integer", 2**31 - 1)])
def test_a_counter_at_its_ceiling_stays_there(bench: Bench, column_type: str, ceiling: int) -> None:
    kind = sql.SQL("alter table jobs alter attempt_count type {}").format(sql.SQL(column_type))
    bench.conn.execute(kind)
    bench.shape = read_shape(bench.conn, SPEC)
    job = Job(beat_age=4000.0, attempt_count=ceiling, attempts_refunded=ceiling, max_attempts=3)
    swept = one_pass(bench, [row := a_row(job)], Rulebook(), Policy())
    assert swept.judged == {"requeued": 1}
    decision = decide(job, Rulebook(), Policy(), attempt_ceiling=ceiling)
    assert bench.read()[row.id]["attempt_count"] == decision.attempt_after == ceiling
