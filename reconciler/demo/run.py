"""`job-reaper demo`: workers die, jobs come back, and the end is checked.

One loop, one thread: listen to the workers, let accidents happen, let the reaper pass, repaint. The reaper
is the same object an application embeds; nothing in it knows about the demonstration.
"""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import IO, Any

import psycopg

from reconciler.demo.check import Account, check
from reconciler.demo.crew import Crew, Member, Report, State
from reconciler.demo.scenario import (
    FAST,
    MAX_ATTEMPTS,
    NORMAL,
    WORKERS,
    Fate,
    Pace,
    Task,
    environment,
    tasks,
)
from reconciler.demo.stage import Stage, borrowed_stage, furnish, private_stage
from reconciler.demo.view import Happening, Line, Row, Style, View
from reconciler.errors import ReaperError
from reconciler.reaper import Reaper
from reconciler.sql import query

TICK_SEC = 0.06
FINAL = ("done", "failed")


def main(keep: bool = False, dsn: str | None = None, fast: bool = False, seed: int | None = None) -> int:
    """Run the demonstration. 0 when every job is accounted for, 1 when one is not, 130 after Ctrl-C."""
    pace = FAST if fast else NORMAL
    chosen = random.randrange(1_000_000) if seed is None else seed  # noqa: S311 - a play, not a secret
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a bar or a tick must not end the play on an ASCII terminal
    view = View(sys.stdout)
    try:
        with ExitStack() as resources:
            resources.callback(view.close)
            resources.enter_context(_sigterm_as_ctrl_c())
            view.say((("[demo] starting Postgres …" if dsn is None else "[demo] connecting …", Style.DIM),))
            stage = resources.enter_context(
                private_stage(keep=keep) if dsn is None else borrowed_stage(dsn, keep=keep)
            )
            play = tasks(chosen, pace)
            furnish(stage.dsn, play)
            errors = resources.enter_context(tempfile.TemporaryFile())
            account, passes = _Play(stage, play, pace, view, errors).run()
            view.close()
            view.say(*_summary(account, play, passes, seed=chosen))
            if keep:
                view.say(*_kept(stage))
            return 1 if account.faults else 0
    except KeyboardInterrupt:
        view.say((), (("[demo] stopped; workers and database are gone", Style.DIM),))
        return 130
    except BrokenPipeError:
        # Whoever read us left (`demo | head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ReaperError as error:
        sys.stderr.write(f"job-reaper demo: {error}\n")
        return error.exit_code


class _Play:
    """One performance, from the first worker's start to the check."""

    def __init__(self, stage: Stage, play: Sequence[Task], pace: Pace, view: View, errors: IO[bytes]) -> None:
        self._stage = stage
        self._tasks = {task.name: task for task in play}
        self._pace = pace
        self._view = view
        self._errors = errors
        self._env = {**environment(pace), "DATABASE_URL": stage.dsn}
        self._crew = Crew(self._env, pace, errors)
        self._began = time.monotonic()
        self._struck: set[str] = set()
        self._replacements: list[float] = []
        self._passes: list[float] = []
        self._seen_event = 0
        self._rows: list[Row] = []

    def run(self) -> tuple[Account, list[float]]:
        with (
            closing(self._crew),
            psycopg.connect(self._stage.dsn, autocommit=True) as conn,
            closing(Reaper(dsn=self._stage.dsn, env=self._env)) as reaper,
        ):
            for _ in range(WORKERS):
                self._crew.start_one()
            next_pass = time.monotonic() + self._pace.interval_sec
            while not self._is_over():
                for report in self._crew.listen(TICK_SEC):
                    self._hear(report)
                self._let_accidents_happen()
                if time.monotonic() >= next_pass:
                    self._pass(reaper)
                    next_pass = time.monotonic() + self._pace.interval_sec
                self._look(conn)
                self._view.paint(self._headline(), self._rows, self._crew.members.values())
            return check(conn, list(self._tasks.values())), self._passes

    # ── what happens ────────────────────────────────────────────────────────────────────────────────

    def _hear(self, report: Report) -> None:
        if report.what == "finished":
            again = f", attempt {report.attempt}" if (report.attempt or 1) > 1 else ""
            self._tell("worker", f"{report.worker} finished {report.job}{again}", Style.GREEN)
        elif report.what == "fenced":
            lost = f"attempt {report.attempt} of {report.job} is not its own any more"
            self._tell("worker", f"{report.worker} woke up and was fenced: {lost}", Style.YELLOW)
        elif report.what == "died":
            self._mourn(report)

    def _mourn(self, report: Report) -> None:
        task = self._tasks.get(report.job or "")
        if report.code == -signal.SIGKILL and task is not None and task.fate is Fate.POISON:
            self._tell("chaos", f"{task.name} crashed {report.worker}, as it does with everybody", Style.RED)
        elif report.code != -signal.SIGKILL:
            self._tell(
                "demo", f"{report.worker} ended by itself ({report.code}): {self._last_error()}", Style.RED
            )
        self._replacements.append(time.monotonic() + self._pace.replace_sec)

    def _let_accidents_happen(self) -> None:
        now = time.monotonic()
        for member in self._crew.alive():
            task = self._tasks.get(member.job or "")
            if (
                task is not None
                and member.state is State.BUSY
                and member.attempt == 1
                and task.name not in self._struck
                and now - member.claimed_at >= task.accident_sec
            ):
                self._strike(member, task)
        for frozen in [member for member in self._crew.alive() if member.state is State.FROZEN]:
            if self._status_of(frozen.job) in FINAL:
                self._crew.wake(frozen)
        due = [moment for moment in self._replacements if moment <= now]
        for moment in due:
            self._replacements.remove(moment)
            self._crew.start_one()

    def _strike(self, member: Member, task: Task) -> None:
        if task.fate is Fate.KILLED:
            self._struck.add(task.name)
            self._crew.kill(member)
            self._tell("chaos", f"{member.name} killed (SIGKILL) in the middle of {task.name}", Style.RED)
        elif task.fate is Fate.HUNG:
            self._struck.add(task.name)
            self._crew.freeze(member)
            self._tell("chaos", f"{member.name} hangs (SIGSTOP) in the middle of {task.name}", Style.YELLOW)

    def _pass(self, reaper: Reaper) -> None:
        report = reaper.run_once()
        self._passes.append(report.pass_ms)
        for table in report.tables.values():
            if table.error is not None:
                self._tell("reaper", f"{table.name}: {table.error.code}: {table.error.message}", Style.RED)

    # ── what is seen ────────────────────────────────────────────────────────────────────────────────

    def _look(self, conn: psycopg.Connection[Any]) -> None:
        self._rows = [Row(*row) for row in conn.execute(query("demo", "rows")).fetchall()]
        for number, job_id, data in conn.execute(query("demo", "events"), {"after": self._seen_event}):
            self._seen_event = number
            details = data["details"]
            run = f"{details['locked_by']}, {details['attempt']}/{details['max_attempts']}"
            whom = f"{data['table']}/{job_id} ({run})"
            if (delay := details["backoff_sec"]) is not None:
                text = f"requeued {whom}: {details['reason']}, again in {delay:.1f} s"
                self._tell("reaper", text, Style.CYAN)
            else:
                self._tell("reaper", f"failed {whom}: {details['reason']}, no attempt left", Style.RED)

    def _is_over(self) -> bool:
        if self._elapsed() > self._pace.patience_sec:
            return True
        frozen = any(
            member.state is State.FROZEN or (member.state is State.BUSY and member.job in self._struck)
            for member in self._crew.alive()
        )
        return bool(self._rows) and all(row.status in FINAL for row in self._rows) and not frozen

    def _headline(self) -> Line:
        count = sum(row.status in FINAL for row in self._rows)
        return (
            (" job-reaper ", Style.BOLD),
            (f" {self._elapsed():4.1f} s   {count} of {len(self._tasks)} jobs ended   ", Style.PLAIN),
            (self._stage.what, Style.DIM),
        )

    def _status_of(self, name: str | None) -> str | None:
        return next((row.status for row in self._rows if row.name == name), None)

    def _tell(self, who: str, text: str, style: Style) -> None:
        self._view.tell(Happening(self._elapsed(), who, text, style))

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"


def _summary(account: Account, play: Sequence[Task], passes: Sequence[float], *, seed: int) -> list[Line]:
    if account.faults:
        title: Line = (("✖ The check found broken promises:", Style.RED),)
        return [(), title, *(((f"  - {fault}", Style.RED),) for fault in account.faults), _again(seed)]
    lines: list[Line] = [
        (),
        ((f"✔ All {len(play)} jobs accounted for, checked in the database:", Style.GREEN),),
        ((f"  {account.done:3d} done, each exactly once", Style.PLAIN),),
        (
            (f"  {account.failed:3d} failed for good after {MAX_ATTEMPTS} attempts: ", Style.PLAIN),
            ("it crashed every worker", Style.DIM),
        ),
        ((f"  {account.requeues:3d} requeued by the reaper, each with its event", Style.PLAIN),),
    ]
    if account.fastest_sec is not None and account.slowest_sec is not None:
        lines.append(
            (
                (
                    f"      back in the queue {account.fastest_sec:.1f} to {account.slowest_sec:.1f} s ",
                    Style.DIM,
                ),
                ("after their leases ended", Style.DIM),
            )
        )
    if passes:
        middle = sorted(passes)[len(passes) // 2]
        lines.append(((f"  {len(passes):3d} passes of the reaper, {middle:.0f} ms each", Style.PLAIN),))
    return [*lines, _again(seed)]


def _again(seed: int) -> Line:
    return ((f"  the same play again: job-reaper demo --seed {seed}", Style.DIM),)


def _kept(stage: Stage) -> list[Line]:
    return [
        (),
        (("The database goes on running:", Style.BOLD),),
        ((f"  psql '{stage.dsn}'", Style.PLAIN),),
        ((f"  to remove it: {stage.how_to_remove}", Style.PLAIN),),
    ]


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """A polite kill cleans up just like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
