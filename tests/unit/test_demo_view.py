"""The demonstration's picture: fits the terminal, never breaks a colour code, stays plain in a file."""

from __future__ import annotations

import io
import os
import re
import shutil

import pytest

from reconciler.demo.view import Happening, Row, Style, View

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_row(number: int = 1, **changes: object) -> Row:
    values: dict[str, object] = {
        "table": "asr_jobs",
        "id": number,
        "title": "a very long title.wav",
        "stage": "burnin",
        "status": "processing",
        "holder": "worker-10",
        "attempts": 1,
        "max_attempts": 3,
        "lease_sec": 6.0,
        "due_sec": None,
        "fail_code": None,
    }
    return Row(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The terminal's size; a test may change it."""
    current = [80, 24]
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((current[0], current[1])))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return current


def painted(out: io.StringIO) -> list[str]:
    return [ESCAPE.sub("", line) for line in out.getvalue().split("\n")]


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (60, 20), (200, 60)])
def test_a_picture_fits_the_terminal(size: list[int], columns: int, lines: int) -> None:
    size[:] = [columns, lines]
    out = Terminal()
    view = View(out)
    for second in range(50):
        view.tell(Happening(second, "reaper", "x" * 300, Style.CYAN))
    view.paint((("headline", Style.BOLD),), [a_row(number) for number in range(12)], [])
    shown = painted(out)
    assert view.live
    assert len(shown) <= lines
    assert max(map(len, shown)) < columns


def test_a_row_with_a_full_lease_is_whole_on_80_columns(size: list[int]) -> None:
    out = Terminal()
    View(out).paint((), [a_row(lease_sec=6.0), a_row(status="queued", due_sec=2.0, holder=None)], [])
    assert any(line.endswith("██████ 6.0 s") for line in painted(out))
    assert any(line.endswith("due in 2.0 s") for line in painted(out))


@pytest.mark.parametrize("columns", range(60, 90))
def test_cutting_a_line_never_cuts_a_colour(size: list[int], columns: int) -> None:
    size[0] = columns
    out = Terminal()
    View(out).paint((), [a_row()], [])
    assert "\x1b" not in "".join(painted(out))


def test_the_second_picture_is_drawn_over_the_first(size: list[int]) -> None:
    out = Terminal()
    view = View(out)
    view.paint((), [a_row()], [])
    first = out.getvalue().count("\n")
    view.paint((), [a_row()], [])
    assert f"\x1b[{first}F" in out.getvalue()


def test_the_cursor_comes_back(size: list[int]) -> None:
    out = Terminal()
    view = View(out)
    view.paint((), [a_row()], [])
    view.close()
    assert out.getvalue().endswith("\x1b[?25h")


@pytest.mark.parametrize("case", ["a file", "a dumb terminal", "a small terminal"])
def test_elsewhere_each_happening_is_one_line(
    size: list[int], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    out = io.StringIO() if case == "a file" else Terminal()
    if case == "a dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    if case == "a small terminal":
        size[:] = [40, 10]
    view = View(out)
    view.tell(Happening(1.25, "chaos", "worker-1 killed", Style.RED))
    view.paint((), [a_row()], [])
    view.close()
    assert ESCAPE.sub("", out.getvalue()) == "  1.2s chaos  worker-1 killed\n"


def test_no_color_is_honoured(size: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    View(out).paint((), [a_row()], [])
    assert not re.search(r"\x1b\[[0-9;]*m", out.getvalue())
