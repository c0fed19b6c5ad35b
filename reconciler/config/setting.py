"""What is known about one key, kept beside its field: grammar, meaning, variables, secrecy.

The schema's classes are the only list of keys. Loading, errors, `job-reaper config` and the reference
page all walk it, so that none of them can know a key the others do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from reconciler.config.grammar import Grammar

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One key. `env` overrides the file; `fallback` is only a default of it: the file wins over those.

    Both are ordered, the strongest first. A nullable key takes null (or an empty text) for "not set".
    """

    grammar: Grammar
    about: str
    env: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    nullable: bool = False
    secret: bool = False
    in_file: bool = True

    def parse(self, value: object) -> Any:
        if self.nullable and (value is None or (isinstance(value, str) and not value.strip())):
            return None
        return self.grammar.parse(value)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.parse)


class Section(BaseModel):
    """A mapping in the file. Keys are camelCase there, attributes are snake_case here."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, hide_input_in_errors=True, defer_build=True
    )
    shorthand: ClassVar[str | None] = None
    """The key that a bare value stands for (`clip: 6` for `clip: {factor: 6}`)."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A place in the tree that is not a value: a section, or a mapping of names to sections."""

    section: type[Section] | None
    of: type[Section] | None = None


@cache
def branches(section: type[Section]) -> Mapping[str, tuple[str, FieldInfo, Branch | Setting]]:
    """The section's keys: alias -> (attribute, field, what is below)."""
    found: dict[str, tuple[str, FieldInfo, Branch | Setting]] = {}
    for name, field in section.model_fields.items():
        alias = field.alias or name
        setting = next((item for item in field.metadata if isinstance(item, Setting)), None)
        if setting is not None:
            found[alias] = (name, field, setting)
        elif get_origin(field.annotation) is Mapping:
            found[alias] = (name, field, Branch(None, get_args(field.annotation)[1]))
        else:
            assert isinstance(field.annotation, type)
            assert issubclass(field.annotation, Section)
            found[alias] = (name, field, Branch(field.annotation))
    return MappingProxyType(found)


def locate(root: type[Section], path: Path) -> tuple[int, Branch | Setting | None]:
    """Follow the path as far as the schema knows it: (segments understood, what stands there).

    None stands for an unknown key. A Setting reached before the end means the path goes below a value.
    """
    here: Branch | Setting = Branch(root)
    for depth, segment in enumerate(path):
        if isinstance(here, Setting):
            return depth, here
        if here.section is None:
            here = Branch(here.of)
            continue
        entry = branches(here.section).get(segment)
        if entry is None:
            return depth, None
        here = entry[2]
    return len(path), here


def walk(root: type[Section], above: Path = ()) -> Iterator[tuple[Path, FieldInfo, Setting]]:
    """Every key of the schema; the names of mappings read `<name>`."""
    for alias, (_, field, below) in branches(root).items():
        path = (*above, alias)
        if isinstance(below, Setting):
            yield path, field, below
        elif below.section is not None:
            yield from walk(below.section, path)
        elif below.of is not None:
            yield from walk(below.of, (*path, "<name>"))


def dotted(path: Path) -> str:
    """`lease.defaultSec`; a name that holds a dot or a quote is quoted: `tables."app.jobs".table`."""
    return ".".join(_quoted(part) for part in path)


def _quoted(part: str) -> str:
    if not part.isprintable():
        part = ascii(part)[1:-1]  # never a valid name, but errors must show it on one line
    if len(part) > 130:
        part = f"{part[:127]}…"
    if part and not set(part) & set('."\\ '):
        return part
    return '"' + part.replace("\\", "\\\\").replace('"', '\\"') + '"'


def undotted(key: str) -> Path:
    """The path of a dotted key. Raises ValueError on an unclosed quote or an empty part."""
    parts: list[str] = []
    part: list[str] = []
    quoted = was_quoted = False
    signs = iter(key)
    for sign in signs:
        if quoted and sign == "\\":
            part.append(next(signs, ""))
        elif sign == '"' and (quoted or not part):
            quoted, was_quoted = not quoted, True
        elif sign == "." and not quoted:
            if not part and not was_quoted:
                raise ValueError(key)
            parts.append("".join(part))
            part, was_quoted = [], False
        else:
            part.append(sign)
    if quoted or (not part and not was_quoted):
        raise ValueError(key)
    return (*parts, "".join(part))
