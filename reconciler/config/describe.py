"""The effective configuration, shown: as rows, as a document that can be loaded again, as a checksum."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from reconciler.config.mask import masked_dsn
from reconciler.config.setting import Path, Section, Setting, branches, dotted
from reconciler.config.settings import Settings


def leaves(section: Section, above: Path = ()) -> Iterator[tuple[Path, Setting, Any]]:
    """Every value of the tree with its path."""
    for alias, (name, _, below) in branches(type(section)).items():
        path, value = (*above, alias), getattr(section, name)
        if isinstance(below, Setting):
            yield path, below, value
        elif below.section is not None:
            yield from leaves(value, path)
        else:
            for key, entry in value.items():
                yield from leaves(entry, (*path, key))


def plain(value: Any) -> Any:
    """The value as JSON and YAML know it."""
    if isinstance(value, Decimal | float):
        return int(value) if value == int(value) else float(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def _shown(setting: Setting, value: Any) -> Any:
    return masked_dsn(value) if setting.secret and value is not None else plain(value)


def describe(settings: Settings) -> list[dict[str, Any]]:
    """Rows of key, value and source, in the file's order; secrets masked."""
    return [
        {"key": key, "value": _shown(setting, value), "source": settings.sources.get(key, "default")}
        for path, setting, value in leaves(settings)
        for key in (dotted(path),)
    ]


def document(settings: Settings) -> dict[str, Any]:
    """The same in the file's shape: loading it gives these settings again (but for masked secrets)."""
    tree: dict[str, Any] = {}
    for path, setting, value in leaves(settings):
        if not setting.in_file or value is None:
            continue
        here = tree
        for part in path[:-1]:
            here = here.setdefault(part, {})
        here[path[-1]] = _shown(setting, value)
    return tree


def checksum(settings: Settings) -> str:
    """sha256 over the values, whatever their source; the order of the tables counts, other orders do not."""
    import hashlib  # noqa: PLC0415 - not every command asks for it
    import json  # noqa: PLC0415

    content = [list(settings.tables), document(settings)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
