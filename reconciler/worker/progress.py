"""Progress: few events for many reports, and a parser for ffmpeg's `-progress` output."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from reconciler.worker.context import JobContext
from reconciler.worker.errors import ArgumentError
from reconciler.worker.events import PROGRESS
from reconciler.worker.session import LOST_CONNECTION

_log = logging.getLogger(__name__)


@dataclass
class Throttle:
    """Lets a report through when it moved by 1 % or 500 ms have passed; the first and 100 % always."""

    min_delta: float = 1.0
    min_interval_sec: float = 0.5
    clock: Callable[[], float] = time.monotonic
    _percent: float | None = field(default=None, init=False)
    _at: float = field(default=0.0, init=False)

    def lets_through(self, percent: float) -> bool:
        """Judge one report, and remember it when it goes through. A repetition says nothing new."""
        now = self.clock()
        if self._percent is not None and (
            percent == self._percent
            or (
                percent < 100
                and abs(percent - self._percent) < self.min_delta
                and now - self._at < self.min_interval_sec
            )
        ):
            return False
        self._percent, self._at = percent, now
        return True


class Progress:
    """Reports of one job. `report` is cheap when throttled; it also notices when the run must stop."""

    def __init__(self, job: JobContext, throttle: Throttle | None = None) -> None:
        self._job = job
        self._throttle = throttle if throttle is not None else Throttle()

    def report(self, percent: float) -> bool:
        """Tell how far the work is, in percent. True when an event was written."""
        if not isinstance(percent, int | float) or percent != percent:  # noqa: PLR0124 - NaN
            raise ArgumentError("percent", percent, "a number from 0 to 100")
        self._job.check()
        percent = round(min(100.0, max(0.0, float(percent))), 2)
        if not self._throttle.lets_through(percent):
            return False
        self._job.last_percent = percent
        try:
            self._job.emit(PROGRESS, {"percent": percent}, patient=False)
        except LOST_CONNECTION as error:
            # The work goes on: an hour of encoding is worth more than a line about it.
            _log.warning("progress not written", extra={"percent": percent, "error": str(error).strip()})
            return False
        return True


@dataclass(frozen=True, slots=True)
class FfmpegProgress:
    """One block of ffmpeg's report: how much output there is, and whether it was the last block."""

    out_sec: float | None
    speed: float | None
    ended: bool

    def percent(self, duration_sec: float) -> float | None:
        """How far, given how long the output will be."""
        if self.ended:
            return 100.0
        if self.out_sec is None or duration_sec <= 0:
            return None
        return min(100.0, max(0.0, 100.0 * self.out_sec / duration_sec))


def parse_ffmpeg_progress(lines: Iterable[str]) -> Iterator[FfmpegProgress]:
    """Read `ffmpeg -progress pipe:1`: key=value lines, each block closed by `progress=`.

    Values may be `N/A` before the first frame, and unknown keys come and go with versions: both are skipped.
    """
    block: dict[str, str] = {}
    for line in lines:
        key, found, value = line.strip().partition("=")
        if not found:
            continue
        block[key.strip()] = value.strip()
        if key.strip() == "progress":
            yield FfmpegProgress(
                out_sec=_out_sec(block),
                speed=_number(block.get("speed", "").rstrip("x")),
                ended=value == "end",
            )
            block = {}


def _out_sec(block: dict[str, str]) -> float | None:
    # out_time_ms is in microseconds too, an old mistake that ffmpeg keeps for compatibility.
    for key in ("out_time_us", "out_time_ms"):
        value = _number(block.get(key, ""))
        if value is not None:
            return max(0.0, value / 1_000_000)
    hours, _, rest = block.get("out_time", "").partition(":")
    minutes, _, seconds = rest.partition(":")
    parts = [_number(part) for part in (hours, minutes, seconds)]
    if any(part is None for part in parts):
        return None
    h, m, s = (part or 0.0 for part in parts)
    return max(0.0, h * 3600 + m * 60 + s)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) != float("inf") and value == value else None  # noqa: PLR0124 - NaN
