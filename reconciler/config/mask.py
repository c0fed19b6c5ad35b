"""What may be shown of a value. In doubt more is hidden, never less."""

from __future__ import annotations

import re

HIDDEN = "***"
# Patterns are compiled by `re` when first used: a start that shows nothing should not pay for them.
# The password ends at the last @, not the first: people forget to percent-encode, and half is too much.
_USERINFO = r"(?s)([A-Za-z][A-Za-z0-9+.-]*://[^:@]*):(.*)@"
_QUERY = r"([?&])([^=&]*)=([^&]*)"
_PAIR = r"(?is)(\w*password)(\s*=\s*)('(?:\\.|[^'\\])*'?|(?:\\.|\S)*)"
_HARMLESS = r"(?i)[+-]?[0-9.]{1,20}|true|false|yes|no|on|off"


def masked_dsn(dsn: str | None) -> str:
    """The connection string without its passwords: URL, `key=value`, and `?password=` forms."""
    if dsn is None:
        return "(libpq's PG* variables)"
    if re.match(r"\s*[A-Za-z][A-Za-z0-9+.-]*://", dsn):
        return re.sub(_QUERY, _masked_parameter, re.sub(_USERINFO, rf"\1:{HIDDEN}@", dsn))
    return re.sub(_USERINFO, rf"\1:{HIDDEN}@", re.sub(_PAIR, rf"\1\2{HIDDEN}", dsn))


def _masked_parameter(match: re.Match[str]) -> str:
    from urllib.parse import unquote  # noqa: PLC0415 - few starts have anything to mask

    # libpq decodes the names too, so `pass%77ord` is a password.
    name = unquote(match[2]).lower()
    return f"{match[1]}{match[2]}={HIDDEN}" if name in ("password", "sslpassword") else match[0]


def shown(value: object, *, secret: bool = False) -> str:
    """A wrong value as an error shows it: short, on one line, and never a secret."""
    if isinstance(value, dict):
        return "{…}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{len(value)} items]"
    if secret:
        return "(hidden)"
    if isinstance(value, int) and abs(value) >= 10**30:
        return "(a number of more than 30 digits)"  # Python refuses to print some of them
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    # Someone may have swapped two variables: what looks like a DSN is masked wherever it turns up.
    text = masked_dsn(str(value))[:2000]
    text = text if text.isprintable() else ascii(text)[1:-1]
    return (text if len(text) <= 80 else f"{text[:77]}…") or "''"


def hinted(value: object) -> str:
    """The value of a key nobody knows: it may be anything, so only what cannot be a secret is shown."""
    if isinstance(value, str) and not re.fullmatch(_HARMLESS, value):
        return "(text)"
    return shown(value)
