"""One given value against the schema: right, or a problem in the four parts a reader needs."""

from __future__ import annotations

from dataclasses import replace

from reconciler.config.given import FILE, Given, did_you_mean
from reconciler.config.grammar import Text
from reconciler.config.mask import hinted, shown
from reconciler.config.setting import Branch, Path, Section, Setting, branches, dotted, locate, walk
from reconciler.errors import Problem

ENTRY_NAME = Text("a name of 1 to 127 characters without a comma", least=1, most=127, forbidden=",")


class Judge:
    """Collects problems; `wrong` remembers the keys they are about, so that each is named once."""

    def __init__(self, root: type[Section], problems: list[Problem]) -> None:
        self.root = root
        self.problems = problems
        self.wrong: set[Path] = set()

    def __call__(self, given: Given) -> Given | None:
        """The value as it will be used, or None where there is none: null, a bare section, a wrong value."""
        depth, found = locate(self.root, given.path)
        if found is None:
            self._unknown(given, given.path[: depth + 1])
            return None
        if isinstance(found, Branch):
            section = found.section
            if section is not None and section.shorthand and given.value is not None and given.value != {}:
                return self(replace(given, path=(*given.path, section.shorthand)))
            self._branch(given, found)
            return None
        if depth < len(given.path):
            self._wrong(given.path[:depth], {"…": None}, found, "", given.where)
            return None
        return self._leaf(given, found)

    def quietly(self, given: Given) -> object:
        """The parsed value, or None where it is wrong; nothing is reported."""
        _, found = locate(self.root, given.path)
        try:
            return found.parse(given.value) if isinstance(found, Setting) else None
        except ValueError:
            return None

    def refuse(self, path: Path, value: object, hint: str, where: str) -> None:
        """Report a key that is known but not acceptable as it is."""
        _, found = locate(self.root, path)
        assert isinstance(found, Setting)
        self._wrong(path, value, found, hint, where)

    def _leaf(self, given: Given, setting: Setting) -> Given | None:
        if given.value is None or not self._names(given):
            return None
        if given.rank == FILE and not setting.in_file:
            key = dotted(given.path)
            hint = f"Set {setting.env[0]} from a Secret instead"
            self._report(given.path, Problem(key, "(hidden)", "not allowed in the file", hint, given.where))
            return None
        try:
            value = setting.parse(given.value)
        except ValueError as error:
            self._wrong(given.path, given.value, setting, str(error), given.where)
            return None
        return None if value is None else replace(given, value=value)

    def _names(self, given: Given) -> bool:
        """The names a mapping's entries are given become metric labels and words in events."""
        depth = 2 if given.path[:2] == ("liveness", "causes") else 1
        if (given.path[0] not in ("tables", "stages") and depth == 1) or len(given.path) <= depth:
            return True
        try:
            ok = ENTRY_NAME.parse(given.path[depth]) == given.path[depth]
        except ValueError:
            ok = False
        if not ok:
            path = given.path[: depth + 1]
            self._report(path, Problem(dotted(path), "…", ENTRY_NAME.allowed, "", given.where))
        return ok

    def _branch(self, given: Given, branch: Branch) -> None:
        key = dotted(given.path)
        if given.path == ("tables",) and given.value == {}:
            hint = "Leave the key out for jobs and asr_jobs"
            self._report(given.path, Problem(key, "{}", "at least one table", hint, given.where))
        elif given.value is None or given.value == {}:
            self._names(given)
        else:
            keys = f"the keys {', '.join(branches(branch.section))}" if branch.section else "names"
            self._report(
                given.path, Problem(key, hinted(given.value), f"a mapping of {keys}", "", given.where)
            )

    def _unknown(self, given: Given, path: Path) -> None:
        _, above = locate(self.root, path[:-1])
        assert isinstance(above, Branch)
        assert above.section is not None
        siblings = tuple(branches(above.section))
        hint = did_you_mean(path[-1], siblings) or self._elsewhere(path[-1])
        value = hinted(given.value) if len(path) == len(given.path) else "{…}"
        self._report(
            path, Problem(dotted(path), value, f"one of the keys {', '.join(siblings)}", hint, given.where)
        )

    def _elsewhere(self, word: str) -> str:
        """The right key in the wrong section."""
        plain = word.casefold().replace("_", "")
        for path, _, _ in walk(self.root):
            if path[-1].casefold() == plain:
                return f"Did you mean {dotted(path)}?"
        return ""

    def _wrong(self, path: Path, value: object, setting: Setting, hint: str, where: str) -> None:
        text = shown(value, secret=setting.secret)
        self._report(path, Problem(dotted(path), text, setting.grammar.allowed, hint, where))

    def _report(self, path: Path, problem: Problem) -> None:
        seen = path in self.wrong
        self.wrong.add(path)
        if not seen or not any(p.key == problem.key and p.source == problem.source for p in self.problems):
            self.problems.append(problem)
