"""The simulated workers from outside: start them, listen to them, kill, freeze and wake them.

Every worker has a process group of its own: Ctrl-C at the terminal reaches only us, and when we are killed
the kernel wakes and hangs up a stopped worker, because its group is orphaned then.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import IO

from reconciler.demo.scenario import Pace


class State(StrEnum):
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    FROZEN = "hung"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Report:
    """One line of a worker's story. `died` is told by us, all others by the worker."""

    worker: str
    what: str
    job: str | None = None
    attempt: int | None = None
    code: int | None = None


@dataclass(slots=True)
class Member:
    """One worker process and what we know of it."""

    name: str
    process: subprocess.Popen[bytes]
    state: State = State.STARTING
    job: str | None = None
    attempt: int | None = None
    claimed_at: float = 0.0
    buffer: bytes = field(default=b"")


class Crew:
    """All workers of the demonstration, dead ones included."""

    def __init__(self, env: Mapping[str, str], pace: Pace, errors: IO[bytes]) -> None:
        self.members: dict[str, Member] = {}
        self._env = env
        self._pace = pace
        self._errors = errors
        self._selector = selectors.DefaultSelector()
        self._numbers = iter(range(1, 10_000))

    def start_one(self) -> Member:
        name = f"worker-{next(self._numbers)}"
        lease = "" if self._pace.lease_sec is None else str(self._pace.lease_sec)
        arguments = [name, str(os.getpid()), lease, str(self._pace.beat_sec)]
        process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", "reconciler.demo.worker_process", *arguments],
            env={**_harmless(os.environ), **self._env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            process_group=0,
        )
        assert process.stdout is not None
        member = Member(name, process)
        self.members[name] = member
        self._selector.register(process.stdout, selectors.EVENT_READ, member)
        return member

    def listen(self, timeout_sec: float) -> Iterator[Report]:
        """What the workers said, and who died, within this time; the time itself is spent here."""
        deadline = time.monotonic() + timeout_sec
        while (left := deadline - time.monotonic()) > 0:
            if not self._selector.get_map():
                time.sleep(left)
                return
            for key, _ in self._selector.select(left):
                member: Member = key.data
                yield from self._hear(member)

    def _hear(self, member: Member) -> Iterator[Report]:
        assert member.process.stdout is not None
        heard = os.read(member.process.stdout.fileno(), 65536)
        if not heard:  # end of file: the process is gone
            self._selector.unregister(member.process.stdout)
            member.process.stdout.close()
            code = member.process.wait()
            member.state = State.DEAD
            yield Report(member.name, "died", member.job, member.attempt, code)
            return
        *lines, member.buffer = (member.buffer + heard).split(b"\n")
        for line in lines:
            yield self._understand(member, json.loads(line))

    def _understand(self, member: Member, said: dict[str, object]) -> Report:
        what = str(said["what"])
        if what == "claimed":
            member.state, member.claimed_at = State.BUSY, time.monotonic()
            member.job, member.attempt = f"{said['table']}/{said['id']}", int(str(said["attempt"]))
        report = Report(member.name, what, member.job, member.attempt)
        if what != "claimed":
            member.state, member.job, member.attempt = State.IDLE, None, None
        return report

    def kill(self, member: Member) -> None:
        member.process.send_signal(signal.SIGKILL)

    def freeze(self, member: Member) -> None:
        member.process.send_signal(signal.SIGSTOP)
        member.state = State.FROZEN

    def wake(self, member: Member) -> None:
        member.state = State.BUSY
        member.process.send_signal(signal.SIGCONT)

    def alive(self) -> list[Member]:
        return [member for member in self.members.values() if member.state is not State.DEAD]

    def close(self) -> None:
        """End every worker. SIGKILL: it also ends stopped ones, and nobody is left who would care."""
        for member in self.members.values():
            if member.process.poll() is None:
                member.process.kill()
            member.process.wait()
            if member.process.stdout is not None:
                member.process.stdout.close()
        self._selector.close()


def _harmless(env: Mapping[str, str]) -> dict[str, str]:
    """What a process needs to start and to reach the database; not the settings of the user's own reaper."""
    kept = (
        "PATH",
        "HOME",
        "LANG",
        "LC_",
        "TMPDIR",
        "PYTHON",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "DYLD_",
        "PG",
    )
    # PGBOSS_* is configuration of ours, the other PG* are libpq's.
    return {key: value for key, value in env.items() if key.startswith(kept) and not key.startswith("PGBOSS")}
