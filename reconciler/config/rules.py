"""Rules that need more than one key. Each names the keys it looked at, so that a rule whose input is
already known to be wrong stays silent: one mistake, one error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reconciler.config.mask import shown
from reconciler.config.setting import Path, Section, dotted
from reconciler.config.settings import Settings
from reconciler.errors import Problem

HEARTBEAT_WARN_SEC = 15
_BEAT: Path = ("lease", "heartbeatSec")
_LEASE: Path = ("lease", "defaultSec")
_BASE: Path = ("backoff", "baseMs")
_MAX: Path = ("backoff", "maxMs")


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that does not hold: the key to blame first, then the others it depends on."""

    paths: tuple[Path, ...]
    value: object
    allowed: str
    hint: str = ""

    def problem(self, where: Mapping[Path, str]) -> Problem:
        blamed = self.paths[0]
        return Problem(
            dotted(blamed), shown(self.value), self.allowed, self.hint, where.get(blamed, "default")
        )


def broken(settings: Settings, where: Mapping[Path, str]) -> Iterator[Broken]:
    """Every rule that does not hold. `where` knows the keys somebody gave."""
    yield from _lease(settings, where)
    yield from _backoff(settings, where)
    for name in settings.tables:
        yield from _vocabulary(settings, name)
    yield from _places(settings)


def _lease(settings: Settings, where: Mapping[Path, str]) -> Iterator[Broken]:
    beat, lease = settings.lease.heartbeat_sec, settings.lease.default_sec
    if 3 * beat <= lease:
        return
    hint = "A worker that misses two beats must not lose its job"
    if _BEAT in where or _LEASE not in where:
        yield Broken(
            (_BEAT, _LEASE), beat, f"at most a third of lease.defaultSec ({lease}): {lease // 3}", hint
        )
    else:
        yield Broken((_LEASE, _BEAT), lease, f"at least 3 x lease.heartbeatSec ({beat}): {3 * beat}", hint)


def _backoff(settings: Settings, where: Mapping[Path, str]) -> Iterator[Broken]:
    base, cap = settings.backoff.base_ms, settings.backoff.max_ms
    if base is None or cap is None or base <= cap:
        return
    if _MAX in where:
        yield Broken((_MAX, _BASE), cap, f"at least backoff.baseMs ({base})")
    else:
        yield Broken(
            (_BASE, _MAX), base, f"at most backoff.maxMs ({cap}, the default)", "Set the cap as well"
        )


def _vocabulary(settings: Settings, name: str) -> Iterator[Broken]:
    """Two meanings behind one word would make the reaper write over what it reads."""
    table = settings.tables[name]
    path = ("tables", name)
    yield from _distinct((*path, "columns"), table.columns, "a column of its own")
    yield from _distinct((*path, "statuses"), table.statuses, "a status word of its own")
    if table.events.job_id == table.events.data:
        key = (*path, "events", "data")
        yield Broken((key, (*path, "events", "jobId")), table.events.data, "a column of its own")


def _distinct(path: Path, section: Section, allowed: str) -> Iterator[Broken]:
    seen: dict[str, Path] = {}
    for name, field in type(section).model_fields.items():
        key, word = (*path, field.alias or name), getattr(section, name)
        if word in seen:
            yield Broken((key, seen[word]), word, allowed, f"{dotted(seen[word])} has the same")
        seen.setdefault(word, key)


def _places(settings: Settings) -> Iterator[Broken]:
    """No two things may live in one table."""
    taken: dict[tuple[str | None, str], Path] = {}
    for name, table in settings.tables.items():
        key: Path = ("tables", name, "table")
        place = (table.schema_name, table.table or name)
        if place in taken:
            yield Broken(
                (key, taken[place], ("tables",)),
                place[1],
                "a table of its own",
                f"{dotted(taken[place])} is the same",
            )
        taken.setdefault(place, key)
    others: list[tuple[Path, tuple[str | None, str]]] = [
        (("tables", name, "events", "table"), (table.events.schema_name, table.events.table))
        for name, table in settings.tables.items()
    ]
    state: tuple[Path, tuple[str | None, str]] = (
        ("state", "table"),
        (settings.state.schema_name, settings.state.table),
    )
    for key, place in [*others, state]:
        if place in taken:
            yield Broken(
                (key, taken[place]), place[1], "another table", f"{dotted(taken[place])} is the same"
            )
    events = {place: key for key, place in others}
    if state[1] in events:
        yield Broken((state[0], events[state[1]]), state[1][1], "another table than the events")


def doubtful(settings: Settings) -> Iterator[str]:
    """What is allowed but probably not meant."""
    beat = settings.lease.heartbeat_sec
    if beat > HEARTBEAT_WARN_SEC:
        yield f"lease.heartbeatSec is {beat}: workers should beat every 10 to {HEARTBEAT_WARN_SEC} s"
    if settings.lease_timeout_sec < 3 * beat:
        yield (
            f"lease.timeoutSec ({settings.lease_timeout_sec}) is below 3 x lease.heartbeatSec ({beat}): "
            "a job without a lease may be taken from a living worker"
        )
    if settings.lock_timeout_ms >= settings.statement_timeout_ms:
        yield (
            f"database.lockTimeoutMs ({settings.lock_timeout_ms}) never applies: "
            f"database.statementTimeoutMs ({settings.statement_timeout_ms}) ends the wait first"
        )
