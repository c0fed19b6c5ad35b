"""Show the play: a table repainted in place on a terminal, one line per happening everywhere else.

Plain ANSI. Lines are built from styled pieces, so that cutting them to the terminal's width never cuts a
colour code in two.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TextIO

from reconciler.demo.crew import Member, State

SMALLEST = (60, 20)
WIDEST_BAR = 6  # blocks of one second each, so that a row fits into 80 columns


class Style(Enum):
    PLAIN = ""
    BOLD = "1"
    DIM = "2"
    RED = "31"
    GREEN = "32"
    YELLOW = "33"
    BLUE = "34"
    CYAN = "36"


Piece = tuple[str, Style]
Line = Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Row:
    """A job as the view shows it; seconds from now, negative when past."""

    table: str
    id: int
    title: str
    stage: str | None
    status: str
    holder: str | None
    attempts: int
    max_attempts: int
    lease_sec: float | None
    due_sec: float | None
    fail_code: str | None

    @property
    def name(self) -> str:
        return f"{self.table}/{self.id}"


@dataclass(frozen=True, slots=True)
class Happening:
    """Something worth a line."""

    at_sec: float
    who: str  # "reaper", "worker", "chaos", "demo"
    text: str
    style: Style = Style.PLAIN


_WHO = {"reaper": Style.CYAN, "chaos": Style.RED, "worker": Style.PLAIN, "demo": Style.DIM}
_STATUS = {
    "queued": ("○ queued", Style.PLAIN),
    "processing": ("▶ processing", Style.BLUE),
    "done": ("✔ done", Style.GREEN),
    "failed": ("✖ failed", Style.RED),
}
_STATE = {
    State.STARTING: ("starting", Style.DIM),
    State.IDLE: ("idle", Style.DIM),
    State.BUSY: ("▶", Style.BLUE),
    State.FROZEN: ("‖ hung", Style.YELLOW),
    State.DEAD: ("✖ dead", Style.RED),
}


class View:
    """Where the play is shown. `live` repaints; otherwise only `tell` writes."""

    def __init__(self, out: TextIO, *, live: bool | None = None, colour: bool | None = None) -> None:
        self._out = out
        is_terminal = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.live = is_terminal and _fits() if live is None else live
        self._colour = is_terminal and "NO_COLOR" not in os.environ if colour is None else colour
        self._painted = 0
        self._happenings: list[Happening] = []

    def tell(self, happening: Happening) -> None:
        self._happenings.append(happening)
        if not self.live:
            self._write([self._told(happening)])

    def say(self, *lines: Line) -> None:
        """Plain lines, before the play and after it."""
        self._write(lines)

    def paint(self, headline: Line, rows: Sequence[Row], members: Iterable[Member]) -> None:
        """Draw the whole picture over the last one."""
        if not self.live:
            return
        width, height = shutil.get_terminal_size()
        names = {member.name: member for member in members}
        lines: list[Line] = [headline, (), _heading(), *(_job(row, names) for row in rows), ()]
        lines += [_workers(names.values()), ()]
        room = max(3, height - len(lines) - 2)
        latest = self._happenings[-room:]
        lines += [self._told(happening) for happening in latest]
        lines += [()] * (room - len(latest))
        lines = lines[: height - 1]
        # One write per picture: a picture in two halves flickers.
        picture = f"\x1b[{self._painted}F" if self._painted else "\x1b[?25l"
        picture += "".join(f"{self._styled(line, width - 1)}\x1b[K\n" for line in lines) + "\x1b[J"
        self._out.write(picture)
        self._out.flush()
        self._painted = len(lines)

    def close(self) -> None:
        """Leave the last picture standing and give the cursor back."""
        if self._painted:
            self._out.write("\x1b[?25h")
            self._out.flush()
            self._painted = 0

    def _told(self, happening: Happening) -> Line:
        return (
            (f"{happening.at_sec:5.1f}s ", Style.DIM),
            (f"{happening.who:<6} ", _WHO.get(happening.who, Style.PLAIN)),
            (happening.text, happening.style),
        )

    def _write(self, lines: Iterable[Line]) -> None:
        self._out.write("".join(self._styled(line, None) + "\n" for line in lines))
        self._out.flush()

    def _styled(self, line: Line, width: int | None) -> str:
        text = ""
        left = width
        for words, style in line:
            shown = words if left is None else words[:left]
            if left is not None:
                left -= len(shown)
            text += f"\x1b[{style.value}m{shown}\x1b[0m" if self._colour and style.value and shown else shown
        return text


def _fits() -> bool:
    size = shutil.get_terminal_size()
    return size.columns >= SMALLEST[0] and size.lines >= SMALLEST[1]


def _heading() -> Line:
    return (
        (f" {'job':<11} {'':<13} {'stage':<7} {'status':<13} {'try':<4} {'holder':<11} lease", Style.DIM),
    )


def _job(row: Row, members: dict[str, Member]) -> Line:
    label, style = _STATUS.get(row.status, (row.status, Style.PLAIN))
    holder = members.get(row.holder or "")
    gone = holder is not None and holder.state in (State.DEAD, State.FROZEN)
    return (
        (f" {row.name:<11} ", Style.BOLD),
        (f"{row.title[:13]:<13} ", Style.DIM),
        (f"{row.stage or '-':<7} ", Style.PLAIN),
        (f"{label:<13} ", style),
        (f"{row.attempts}/{row.max_attempts:<2} ", Style.YELLOW if row.attempts > 1 else Style.PLAIN),
        (f"{row.holder or '':<11} ", Style.RED if gone else Style.PLAIN),
        *_lease(row, gone=gone),
    )


def _lease(row: Row, *, gone: bool) -> Line:
    if row.status == "processing" and row.lease_sec is not None:
        if row.lease_sec <= 0:
            return ((f"expired {-row.lease_sec:.1f} s ago", Style.RED),)
        halves = min(2 * WIDEST_BAR, 1 + int(row.lease_sec * 2))
        bar = "█" * (halves // 2) + "▌" * (halves % 2)
        return ((f"{bar} ", Style.YELLOW if gone else Style.GREEN), (f"{row.lease_sec:.1f} s", Style.DIM))
    if row.status == "queued" and row.due_sec is not None and row.due_sec > 0:
        return ((f"due in {row.due_sec:.1f} s", Style.YELLOW),)
    if row.status == "failed":
        return ((row.fail_code or "", Style.RED),)
    return ()


def _workers(members: Iterable[Member]) -> Line:
    """Those that live, and the last one that died."""
    known = list(members)
    shown = [member for member in known if member.state is not State.DEAD]
    line: list[Piece] = [(" workers  ", Style.DIM)]
    for member in shown:
        label, style = _STATE[member.state]
        line.append((f"{member.name.removeprefix('worker-')} ", Style.BOLD))
        line.append(
            (f"{label}{' ' + member.job if member.job and member.state is State.BUSY else ''}   ", style)
        )
    dead = len(known) - len(shown)
    if dead:
        line.append((f"✖ {dead} dead", Style.RED))
    return line
