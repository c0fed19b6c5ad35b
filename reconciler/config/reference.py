"""The table of all keys in docs/reference/configuration.md, written from the schema.

`python -m reconciler.config.reference docs/reference/configuration.md` renews it in place; a test fails
while the page and the schema disagree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path as FilePath

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from reconciler.config.describe import plain
from reconciler.config.environment import CONFIG, TABLES
from reconciler.config.setting import Path, Setting, walk
from reconciler.config.settings import DEFAULT_FACTORS, Settings

BEGIN = "<!-- keys: written by python -m reconciler.config.reference -->"
END = "<!-- end of keys -->"


def _variables(path: Path, setting: Setting) -> str:
    if path == ("stages", "<name>", "factor"):
        return "`<NAME>_SLA_FACTOR`"
    first = ", then ".join(f"`{name}`" for name in setting.env)
    weak = ", then ".join(f"`{name}`" for name in setting.fallback)
    return "; ".join(part for part in (first, f"below the file: {weak}" if weak else "") if part) or "–"


def _default(path: Path, field: FieldInfo) -> str:
    if path == ("stages", "<name>", "factor"):
        return ", ".join(f"{name} {plain(factor)}" for name, factor in DEFAULT_FACTORS.items())
    if field.default is PydanticUndefined or field.default is None:
        return "null"
    value = plain(field.default)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return "`[" + ", ".join(f'"{item}"' if isinstance(item, str) else str(item) for item in value) + "]`"
    return f"`{value}`" if value != "" else '`""`'


def rows() -> Iterator[str]:
    """One row for each key."""
    for path, field, setting in walk(Settings):
        key = f"`{'.'.join(path)}`" if setting.in_file else f"`{'.'.join(path)}` (not in the file)"
        cells = (
            key,
            _variables(path, setting),
            _default(path, field),
            setting.grammar.allowed,
            setting.about,
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table() -> str:
    """The whole block between the markers."""
    head = (
        "| key in the file | variables, the strongest first | default | allowed | meaning |",
        "|---|---|---|---|---|",
        f"| – | `{CONFIG}` | – | a readable YAML file | path of the file |",
        f"| `tables` (its names) | `{TABLES}` | `jobs`, `asr_jobs` | names separated by commas, each once "
        "| which tables are reaped, in this order |",
    )
    return "\n".join((BEGIN, *head, *rows(), END))


def renewed(page: str) -> str:
    """The page with its block written anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{table()}{after}"


def main(path: str) -> None:
    """Renew the page in place."""
    page = FilePath(path)
    page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
