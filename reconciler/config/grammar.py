"""How one value is written: numbers, words, names, lists. The same for a file, a variable and a flag.

A grammar knows what it allows (the sentence in errors and in the reference page) and parses a raw value,
text or already typed. What it refuses raises ValueError; the message, if any, is a hint for the reader.
Text is never guessed at: `60s`, `1_000`, `0x10`, `yes` for a number are errors, not surprises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any, Protocol

TEN_YEARS_SEC = 315_360_000
"""No duration is longer: beyond it only typing errors live, and SQL intervals begin to overflow."""

# Patterns are compiled by `re` when first used: a start that needs none should not pay for them.
# Exponents are welcome because Helm writes large numbers of its values as 1e+06.
_NUMBER = r"[+-]?[0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?"
_WITH_UNIT = r"([0-9]+(?:\.[0-9]+)?)\s*[A-Za-z%]+"
_PLACEHOLDER = r"\{([^{}]*)\}"
_NAMESPACE = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_URL = r"[Hh][Tt][Tt][Pp][Ss]?://[^\s/?#]+[^\s]*"
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
# What Prisma and other clients of the documents' code base append to DATABASE_URL, and libpq refuses.
_FOREIGN_PARAMETERS = (
    r"[?&](schema|pgbouncer|connection_limit|pool_timeout|socket_timeout|sslaccept|statement_cache_size)="
)


class Grammar(Protocol):
    """What one kind of value may look like."""

    @property
    def allowed(self) -> str: ...

    def parse(self, value: object) -> Any: ...


def _decimal(value: object) -> Decimal:
    # bool is an int to Python; to the reader of a configuration it is not a number.
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")  # noqa: TRY004 - one error type for all refusals
    if isinstance(value, str):
        text = value.strip()
        if unit := re.fullmatch(_WITH_UNIT, text):
            raise ValueError(
                f"Write the bare number without a unit: the key says what it counts ({unit[1]}?)"
            )
        if not re.fullmatch(_NUMBER, text):
            raise ValueError
        return Decimal(text)
    if isinstance(value, int | Decimal):
        number = Decimal(value)
    elif isinstance(value, float):
        number = Decimal(repr(value))
    else:
        raise ValueError  # noqa: TRY004 - one error type for all refusals
    if not number.is_finite():
        raise ValueError
    return number


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError  # noqa: TRY004 - one error type for all refusals
    if not value.isprintable():
        raise ValueError("It holds a control character or bytes that are not UTF-8")
    return value


def _number(value: Decimal) -> str:
    return f"{value.normalize():f}"


@dataclass(frozen=True, eq=False)
class Whole:
    """A whole number within bounds."""

    least: int
    most: int
    unit: str = ""

    @property
    def allowed(self) -> str:
        unit = f" ({self.unit})" if self.unit else ""
        return f"a whole number from {self.least} to {self.most}{unit}"

    def parse(self, value: object) -> int:
        number = _decimal(value)
        if not self.least <= number <= self.most or number != int(number):
            raise ValueError
        return int(number)


@dataclass(frozen=True, eq=False)
class Number:
    """A number within bounds, fractions welcome."""

    least: Decimal
    most: Decimal
    unit: str = ""

    @property
    def allowed(self) -> str:
        unit = f" ({self.unit})" if self.unit else ""
        return f"a number from {_number(self.least)} to {_number(self.most)}{unit}"

    def parse(self, value: object) -> float:
        number = _decimal(value)
        if not self.least <= number <= self.most:
            raise ValueError
        return float(number)


class Factor:
    """An exact positive multiplier. Six decimals, so that it survives a trip through JSON and YAML."""

    most = 10_000

    @property
    def allowed(self) -> str:
        return f"a number above 0 and up to {self.most}, with at most 6 decimals"

    def parse(self, value: object) -> Decimal:
        number = _decimal(value)
        if not Decimal("0.000001") <= number <= self.most:
            raise ValueError
        rounded = number.quantize(Decimal("0.000001"))
        if rounded != number:
            raise ValueError
        return Decimal(int(rounded)) if rounded == int(rounded) else rounded.normalize()


class Flag:
    """Yes or no, in the words people use."""

    allowed = "true or false (also 1/0, yes/no, on/off)"

    def parse(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower() if isinstance(value, str | int) else ""
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise ValueError


@dataclass(frozen=True, eq=False)
class Choice:
    """One of a few words; upper and lower case alike."""

    words: tuple[str, ...]
    synonyms: tuple[tuple[str, str], ...] = ()

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(self.words)}" if len(self.words) > 1 else f"only {self.words[0]}"

    def parse(self, value: object) -> str:
        word = _text(value).strip().lower()
        word = dict(self.synonyms).get(word, word)
        if word not in self.words:
            raise ValueError
        return word


class Name:
    """A Postgres identifier as it stands in the catalogue: case kept, never folded, quoted by the driver."""

    allowed = "a Postgres name of 1 to 63 bytes, without quotes around it"

    def parse(self, value: object) -> str:
        name = _text(value)
        if not 1 <= len(name.encode()) <= 63 or name != name.strip():
            raise ValueError("Postgres would cut it silently" if len(name) > 63 else "")
        if len(name) > 2 and name[0] == name[-1] == '"':
            raise ValueError("Leave the double quotes out: names are quoted for you")
        return name


@dataclass(frozen=True, eq=False)
class Text:
    """Free text on one line."""

    allowed: str = "text on one line, up to 1000 characters"
    least: int = 0
    most: int = 1000
    forbidden: str = ""

    def parse(self, value: object) -> str:
        text = _text(value).strip()
        if not self.least <= len(text) <= self.most or any(sign in text for sign in self.forbidden):
            raise ValueError
        return text


class Namespace:
    """A Kubernetes namespace."""

    allowed = "a Kubernetes namespace: up to 63 of a-z, 0-9 and -"

    def parse(self, value: object) -> str:
        name = _text(value).strip()
        if not re.fullmatch(_NAMESPACE, name):
            raise ValueError
        return name


class Url:
    """An HTTP address."""

    allowed = "an http:// or https:// address"

    def parse(self, value: object) -> str:
        url = _text(value).strip()
        if len(url) > 2000 or not re.fullmatch(_URL, url):
            raise ValueError
        return url


class Dsn:
    """A connection string libpq understands. Only its shape is checked here: libpq has the last word."""

    allowed = "postgresql://user:password@host:5432/name, or host=… dbname=…"

    def parse(self, value: object) -> str:
        dsn = _text(value).strip()
        if not dsn.startswith(("postgresql://", "postgres://")):
            if "://" in dsn.partition("=")[0]:
                raise ValueError("The scheme must be postgresql:// or postgres://")
            if "=" not in dsn:
                raise ValueError
        elif foreign := re.search(_FOREIGN_PARAMETERS, dsn):
            raise ValueError(f"libpq does not know the parameter {foreign[1]!r}: remove it from the URL")
        return dsn


class Ladder:
    """The waits between attempts, each at least as long as the one before."""

    allowed = "a list of 1 to 20 numbers above 0 (seconds), none smaller than the one before"

    def parse(self, value: object) -> tuple[float, ...]:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not 1 <= len(items) <= 20:
            raise ValueError
        step = Number(Decimal("0.001"), Decimal(TEN_YEARS_SEC))
        steps = tuple(step.parse(item) for item in items)
        if any(later < earlier for earlier, later in pairwise(steps)):
            raise ValueError
        return steps


class Patterns:
    """How `locked_by` names a pod. `{pod}` is the one part no pattern can do without."""

    known = ("cluster", "namespace", "pod", "uid", "container")

    @property
    def allowed(self) -> str:
        parts = ", ".join(f"{{{part}}}" for part in self.known)
        return f"a list of 1 to 20 different patterns, each with {{pod}} once; parts: {parts}"

    def parse(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= 20:
            raise ValueError
        patterns = tuple(_text(item).strip() for item in value)
        for pattern in patterns:
            parts = re.findall(_PLACEHOLDER, pattern)
            rest = re.sub(_PLACEHOLDER, "", pattern)
            if "pod" not in parts or len(set(parts)) != len(parts) or not set(parts) <= set(self.known):
                raise ValueError
            if "{" in rest or "}" in rest or len(pattern) > 500:
                raise ValueError
        if len(set(patterns)) != len(patterns):
            raise ValueError
        return patterns
