"""From what was given to what holds: flags over environment over file over defaults, all problems at once.

Every value that is given is judged, also one that another value hides: a mistake in the ConfigMap should
show today, not on the day somebody removes the variable that covered it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from reconciler.backoff import DEFAULT_BASE_MS, DEFAULT_MAX_MS
from reconciler.config import environment, rules
from reconciler.config.describe import leaves
from reconciler.config.given import ENV, FILE, FLAG, Given
from reconciler.config.grammar import Name
from reconciler.config.judge import ENTRY_NAME, Judge
from reconciler.config.mask import shown
from reconciler.config.sections import Lease
from reconciler.config.setting import Branch, Path, Section, branches, dotted, undotted
from reconciler.config.settings import DEFAULT_FACTORS, DEFAULT_TABLES, Settings
from reconciler.config.tables import JobTable
from reconciler.errors import ConfigError, Problem


def load(
    *,
    env: Mapping[str, str] | None = None,
    path: str | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Read, judge and freeze the configuration. Raises ConfigError with every problem found.

    `env` defaults to os.environ, `path` to its REAPER_CONFIG. `overrides` are command-line flags by dotted
    key (`batch.size`); None there means that the flag was not used.
    """
    env = os.environ if env is None else env
    flags = {key: value for key, value in (overrides or {}).items() if value is not None}
    loading = _Loading()
    loading.read_file(path, env)
    selection, selected_by = loading.select(flags.pop("tables", None), env)
    loading.read_env(env)
    loading.read_flags(flags)
    settings = loading.settings(selection, selected_by)
    loading.check(settings)
    if loading.problems:
        raise ConfigError(loading.problems)
    settings._warnings = (*loading.warnings, *rules.doubtful(settings))
    return settings


class _Loading:
    """The state of one load."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.judge = Judge(Settings, self.problems)
        self.won: dict[Path, Given] = {}
        self.from_file: list[Given] = []

    # ── Reading ─────────────────────────────────────────────────────────────────────────────────────

    def read_file(self, path: str | None, env: Mapping[str, str]) -> None:
        named = env.get(environment.CONFIG, "").strip()
        chosen = path or named
        if not chosen:
            return
        asked_by = "flag" if path else f"env {environment.CONFIG}"
        from reconciler.config import file  # noqa: PLC0415 - brings the YAML parser with it

        self.from_file = file.read(chosen, asked_by, self.problems)
        self.take(self.from_file)

    def read_env(self, env: Mapping[str, str]) -> None:
        stages = dict.fromkeys((*DEFAULT_FACTORS, *self.names("stages")))
        given = environment.read(env, stages, self.warnings)
        self.take(given)
        for item in given:
            winner = self.won.get(item.path)
            # An alias that says something else than its namesake is a trap; JOB_* over QUEUE_* is the design.
            if winner and ENV >= winner.rank > item.rank > FILE and not item.source.startswith("env QUEUE_"):
                judged = self.judge.quietly(item)
                if judged is not None and judged != winner.value:
                    kept = f"{winner.source} says {shown(winner.value)}"
                    self.warnings.append(f"{item.source} ({shown(item.value)}) is ignored: {kept}")

    def read_flags(self, flags: Mapping[str, object]) -> None:
        for key, value in flags.items():
            try:
                path = undotted(key)
            except ValueError:
                path = (key,)
            self.take([Given(path, value, FLAG, "flag", "flag")])

    def take(self, given: Iterable[Given]) -> None:
        """Judge the values; the strongest right one of each key wins."""
        for item in given:
            right = self.judge(item)
            if right is None:
                continue
            winner = self.won.get(right.path)
            if winner is None or right.rank > winner.rank:
                self.won[right.path] = right

    def names(self, mapping: str) -> Iterable[str]:
        """The names the file gives under a mapping, in its order."""
        return dict.fromkeys(
            item.path[1] for item in self.from_file if item.path[0] == mapping and len(item.path) > 1
        )

    # ── Tables ──────────────────────────────────────────────────────────────────────────────────────

    def select(self, flag: object, env: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
        """Which tables, in which order, and who said so."""
        raw: object = flag
        source = "flag"
        if raw is None:
            raw = env.get(environment.TABLES, "").strip() or None
            source = f"env {environment.TABLES}"
        if raw is not None:
            return self._named(raw, source), source
        listed = tuple(self.names("tables"))
        return (listed, self.from_file[0].source) if listed else (DEFAULT_TABLES, "default")

    def _named(self, raw: object, source: str) -> tuple[str, ...]:
        try:
            return _table_names(raw)
        except ValueError as error:
            allowed = "table names separated by commas, each once"
            self.problems.append(Problem("tables", shown(raw), allowed, str(error), source))
            self.judge.wrong.add(("tables",))
            return DEFAULT_TABLES

    def _places(self, names: tuple[str, ...], selected_by: str) -> None:
        """Where a table lives that does not say so itself: `app.jobs` is the table jobs in the schema app."""
        for name in names:
            table, schema = ("tables", name, "table"), ("tables", name, "schema")
            given = {key for key in (table, schema) if key in self.won or key in self.judge.wrong}
            if table in given or table[:2] in self.judge.wrong:
                continue
            try:
                place = _place(name, dotted_name=not given)
            except ValueError as error:
                problem = Problem(dotted(table), shown(name), Name().allowed, str(error), selected_by)
                self.problems.append(problem)
                self.judge.wrong.add(table)
                continue
            source = "default" if place[0] == name else selected_by
            for key, part in zip((table, schema), place, strict=True):
                if part is not None:
                    self.won[key] = Given(key, part, 0, source, selected_by)

    # ── Putting it together ─────────────────────────────────────────────────────────────────────────

    def settings(self, names: tuple[str, ...], selected_by: str) -> Settings:
        """The tree of what won, completed by defaults. Wrong values are left out: they are reported."""
        self._places(names, selected_by)
        self._resolve_stages()
        self._resolve_backoff()
        tree = _skeleton(Settings)
        tree["tables"] = {name: _skeleton(JobTable) for name in names}
        tree["stages"] = {name: {} for name in DEFAULT_FACTORS}
        for path, item in self.won.items():
            if path[0] == "tables" and path[1] not in tree["tables"]:
                continue
            here = tree
            for part in path[:-1]:
                here = here.setdefault(part, {})
            here[path[-1]] = item.value
        lease = tree["lease"]
        lease.setdefault("timeoutSec", lease.get("defaultSec", Lease.model_fields["default_sec"].default))
        for cause in self.names_below("liveness", "causes"):
            tree["liveness"].setdefault("causes", {}).setdefault(cause, {})
        settings = Settings.model_validate(tree)
        settings._sources = MappingProxyType(
            {
                dotted(path): self.won[path].source if path in self.won else "default"
                for path, _, _ in leaves(settings)
            }
        )
        return settings

    def names_below(self, *above: str) -> Iterable[str]:
        depth = len(above)
        return dict.fromkeys(
            item.path[depth]
            for item in self.from_file
            if len(item.path) > depth and item.path[:depth] == above
        )

    def _resolve_stages(self) -> None:
        for name, factor in DEFAULT_FACTORS.items():
            path: Path = ("stages", name, "factor")
            self.won.setdefault(path, Given(path, factor, 0, "default", "default"))
        for name in self.names("stages"):
            path = ("stages", name, "factor")
            if path not in self.won and path not in self.judge.wrong and path[:2] not in self.judge.wrong:
                self.judge.refuse(path, "(missing)", "", self.from_file[0].source)

    def _resolve_backoff(self) -> None:
        """A ladder or a doubling, never both: the form that was given by the stronger hand holds."""
        steps, base, cap = (("backoff", key) for key in ("stepsSec", "baseMs", "maxMs"))
        ladder = self.won.get(steps)
        doubling = [self.won[key] for key in (base, cap) if key in self.won]
        if not doubling:
            return
        strongest = max(doubling, key=lambda item: item.rank)
        if ladder and ladder.rank == strongest.rank:
            hint = f"{dotted(strongest.path)} is given as well: remove one of the two"
            allowed = "either stepsSec or baseMs and maxMs"
            self.problems.append(Problem(dotted(steps), shown(ladder.value), allowed, hint, ladder.where))
        if ladder and ladder.rank > strongest.rank:
            self.won.pop(base, None)
            self.won.pop(cap, None)
            return
        self.won[steps] = Given(steps, None, 0, "default", "default")
        if base not in self.won:
            # Where only a cap is given, it holds from the first wait on.
            self.won[base] = Given(
                base, min(DEFAULT_BASE_MS, int(str(self.won[cap].value))), 0, "default", "default"
            )
        if cap not in self.won:
            self.won[cap] = Given(cap, DEFAULT_MAX_MS, 0, "default", "default")

    def check(self, settings: Settings) -> None:
        """Rules over several keys, but not over keys that are wrong by themselves."""
        where = {path: item.where for path, item in self.won.items() if item.rank > 0}
        for rule in rules.broken(settings, where):
            if not self.judge.wrong.intersection(rule.paths):
                self.problems.append(rule.problem(where))


def _skeleton(section: type[Section]) -> dict[str, Any]:
    # An empty mapping for each section, so that pydantic compiles one schema and not another one for every
    # section it would build by default: 6 ms instead of 8 at each start.
    below = ((alias, entry[2]) for alias, entry in branches(section).items())
    return {alias: _skeleton(b.section) for alias, b in below if isinstance(b, Branch) and b.section}


def _table_names(raw: object) -> tuple[str, ...]:
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError
    names = tuple(ENTRY_NAME.parse(part) for part in parts)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{shown(twice)} is named twice")
    return names


def _place(name: str, *, dotted_name: bool) -> tuple[str, str | None]:
    """(table, schema) of a table that is only named."""
    parts = name.split(".") if dotted_name else [name]
    if len(parts) > 2:
        raise ValueError("Give schema and table in the file: the name has more than one dot")
    table, *schema = (Name().parse(part) for part in reversed(parts))
    return table, schema[0] if schema else None
