"""One value somebody gave, before it is judged, and how the ways of giving rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from reconciler.config.setting import Path

# Higher wins. Within the two ranks of variables the later names of a key count down from here.
FALLBACK: Final = 100
FILE: Final = 200
ENV: Final = 300
FLAG: Final = 400


@dataclass(frozen=True, slots=True)
class Given:
    """`source` is for `job-reaper config`; `where` is the same for errors, with the line in the file."""

    path: Path
    value: object
    rank: int
    source: str
    where: str


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known word, or nothing."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a wrong configuration pays for it

    def plain(text: str) -> str:
        return text.casefold().replace("_", "").replace("-", "")

    candidates = {plain(name): name for name in known}
    near = get_close_matches(plain(word)[:100], candidates, n=1, cutoff=0.7)
    return f"Did you mean {candidates[near[0]]}?" if near else ""
