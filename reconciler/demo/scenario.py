"""What the demonstration is about: the jobs, what happens to them, and how fast it all goes. Pure values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

TABLES = ("jobs", "asr_jobs")
MAX_ATTEMPTS = 3


class Fate(StrEnum):
    """What befalls the worker that runs this job for the first time."""

    CALM = "calm"
    KILLED = "killed"  # SIGKILL in the middle of the work: a lost node, the OOM killer
    HUNG = "hung"  # SIGSTOP: alive, but silent; it comes back when its job is long done
    POISON = "poison"  # the job itself kills every worker that touches it


@dataclass(frozen=True, slots=True)
class Task:
    """One job of the demonstration."""

    table: str
    id: int
    title: str
    stage: str
    work_sec: float
    expected_ms: int
    fate: Fate = Fate.CALM
    accident_sec: float = 0.0  # from the claim to the accident

    @property
    def name(self) -> str:
        return f"{self.table}/{self.id}"


@dataclass(frozen=True, slots=True)
class Pace:
    """The clock of the whole play. `lease_sec` None lets each stage's SLA decide, as in production."""

    lease_sec: float | None
    beat_sec: float
    interval_sec: float
    backoff_base_ms: int
    backoff_max_ms: int
    work_sec: tuple[float, float]
    accident_sec: tuple[float, float]
    replace_sec: float  # from a worker's death to its replacement's start
    patience_sec: float  # after which the play is over, whatever happened


# Short enough to watch, long enough to follow with the eye: about half a minute.
NORMAL = Pace(None, 1.0, 1.0, 2000, 3000, (1.8, 3.6), (0.8, 2.6), 1.5, 90.0)
# For tests: the same play in a few seconds.
FAST = Pace(1.0, 0.25, 0.25, 200, 400, (0.2, 0.5), (0.1, 0.4), 0.1, 60.0)

DEFAULT_LEASE_SEC = 4
WORKERS = 5
_CLIPS = (
    "intro.mp4",
    "trailer.mp4",
    "interview.mp4",
    "match.mp4",
    "recipe.mp4",
    "lecture.mp4",
    "concert.mp4",
)
_SPEECH = ("podcast.wav", "keynote.wav", "hearing.wav", "audiobook.wav", "call.wav")


def tasks(seed: int, pace: Pace) -> list[Task]:
    """Twelve jobs in two tables: one poisoned, one whose worker hangs, three whose workers are killed."""
    dice = random.Random(seed)  # noqa: S311 - a play, not a secret
    made = []
    for table, titles, stages in (
        ("jobs", _CLIPS, ("clip", "burnin")),
        ("asr_jobs", _SPEECH, ("asr",)),
    ):
        for number, title in enumerate(titles, start=1):
            work_sec = round(dice.uniform(*pace.work_sec), 2)
            stage = dice.choice(stages)
            accident_sec = round(dice.uniform(*pace.accident_sec), 2)
            # An estimate far below the truth keeps the SLA leases watchable: 6 s for speech, 4 s for clips.
            made.append(Task(table, number, title, stage, work_sec, 500, accident_sec=accident_sec))
    for task, fate in zip(_victims(made, dice), _FATES, strict=True):
        made[made.index(task)] = replace(task, fate=fate)
    return made


_FATES = (Fate.POISON, Fate.HUNG, Fate.KILLED, Fate.KILLED, Fate.KILLED)


def _victims(made: list[Task], dice: random.Random) -> list[Task]:
    """The jobs that suffer, in the order of _FATES. What takes longest to recover from comes first."""
    first = [task for task in made if task.id <= 3]
    poison = dice.choice([task for task in first if task.table == "jobs"])
    first.remove(poison)
    later = [task for task in made if task.id > 3]
    return [poison, *dice.sample(first, 3), dice.choice(later)]


def environment(pace: Pace) -> Mapping[str, str]:
    """The configuration that workers and reaper share, in the documents' own variables."""
    return {
        "DEFAULT_LEASE_SEC": str(DEFAULT_LEASE_SEC),
        "HEARTBEAT_SEC": "1",
        "JOB_MAX_ATTEMPTS": str(MAX_ATTEMPTS),
        "JOB_RETRY_BACKOFF_MS_BASE": str(pace.backoff_base_ms),
        "JOB_RETRY_BACKOFF_MS_MAX": str(pace.backoff_max_ms),
        "REAPER_LIVENESS": "off",
        "REAPER_TABLES": ",".join(TABLES),
    }
