"""The YAML file, read as text: what each key means is decided by the schema, not by YAML.

YAML 1.1 reads `mode: off` as false, `1:30` as ninety and `010` as eight. Here every plain scalar but null
stays the text that was written, and one grammar reads files and variables alike. The nodes are kept until
the lines are known, so that an error can point at its line.

Imported only where a file is given: a pass without one should not pay 20 ms for the parser.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from reconciler.config.given import FILE, Given
from reconciler.config.mask import shown
from reconciler.config.setting import Path, dotted
from reconciler.errors import Problem

MAX_BYTES = 262_144
"""Hundreds of tables fit; a path that leads to a log or a device does not."""
_MAX_NODES = 50_000
"""Aliases can unfold a small file into billions of values."""
_MAX_DEPTH = 50
_CORE_TAG = "tag:yaml.org,2002:"
# What plain YAML resolves to by itself. All of it is read as text; other tags ask for more than a value.
_KNOWN_TAGS = frozenset(
    _CORE_TAG + kind
    for kind in ("null", "bool", "int", "float", "timestamp", "str", "seq", "map", "merge", "value")
)


class _Refused(Exception):  # noqa: N818 - control flow within this module
    """The file as a whole cannot be used."""


def read(path: str, asked_by: str, problems: list[Problem]) -> list[Given]:
    """All values of the file, in order. What is wrong with the file itself is added to `problems`."""
    try:
        return list(_Reader(path, problems).given(_text(path)))
    except _Refused as error:
        hint = str(error)
    except RecursionError:
        hint = f"It is nested more than {_MAX_DEPTH} levels deep"
    problems.append(Problem("REAPER_CONFIG", shown(path), "a readable YAML file", hint, asked_by))
    return []


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _Refused(getattr(error, "strerror", None) or "This is not a path") from None
    if len(raw) > MAX_BYTES:
        raise _Refused("It is larger than 256 KiB: is this the right file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _Refused(f"It is not UTF-8 (byte {error.start})") from None


class _Reader:
    def __init__(self, path: str, problems: list[Problem]) -> None:
        self.path = path if path.isprintable() else ascii(path)[1:-1]
        self.problems = problems
        self.nodes = 0

    def given(self, text: str) -> Iterator[Given]:
        if text.count("[") + text.count("{") > _MAX_NODES:
            raise _Refused(f"It holds more than {_MAX_NODES} values")
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            # Never str(error): it quotes the line, and somebody may have written a password there.
            said = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
            raise _Refused(f"Invalid YAML{at}: {said}") from None
        if root is None or self._is_null(root):
            return
        if not isinstance(root, MappingNode):
            raise _Refused("The file must be a mapping of keys to values")
        if root.value:
            yield from self._leaves(root, ())

    def _is_null(self, node: Node) -> bool:
        return bool(node.tag == f"{_CORE_TAG}null")

    def _count(self, node: Node, depth: int) -> None:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise _Refused(f"It holds more than {_MAX_NODES} values (aliases unfolded)")
        if depth > _MAX_DEPTH:
            raise RecursionError
        if node.tag not in _KNOWN_TAGS:
            raise _Refused(f"Line {node.start_mark.line + 1}: the tag {node.tag[:40]} is not supported")

    def _leaves(self, node: Node, path: Path) -> Iterator[Given]:
        self._count(node, len(path))
        if not isinstance(node, MappingNode) or not node.value:
            yield self._leaf(node, path)
            return
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode) or self._is_null(key_node):
                self._complain((*path, "?"), "a plain word as key", "", line)
                continue
            key = key_node.value
            if key in seen:
                self._complain((*path, key), "each key once", f"It stands in line {seen[key]} already", line)
                continue
            seen[key] = line
            if key == "<<":
                self._complain((*path, key), "keys", "Merge keys are not supported: write the keys out", line)
                continue
            yield from self._leaves(value_node, (*path, key))

    def _leaf(self, node: Node, path: Path) -> Given:
        where = f"file {self.path}, line {node.start_mark.line + 1}"
        return Given(path, self._value(node, len(path)), FILE, f"file {self.path}", where)

    def _value(self, node: Node, depth: int) -> object:
        if isinstance(node, ScalarNode):
            return None if self._is_null(node) else node.value
        if isinstance(node, SequenceNode):
            return [self._item(child, depth + 1) for child in node.value]
        return {"…": None} if node.value else {}

    def _item(self, node: Node, depth: int) -> object:
        self._count(node, depth)
        return self._value(node, depth)

    def _complain(self, path: Path, allowed: str, hint: str, line: int) -> None:
        self.problems.append(Problem(dotted(path), "…", allowed, hint, f"file {self.path}, line {line}"))
