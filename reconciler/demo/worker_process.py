"""One simulated worker: a real process on the real SDK, which may be killed at any line.

Started as `python -m reconciler.demo.worker_process NAME PARENT_PID LEASE_SEC BEAT_SEC` with DATABASE_URL and
the demonstration's configuration in its environment. It tells its story as JSON lines on stdout; the truth
is in the database.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import psycopg

from reconciler.demo.scenario import TABLES, Fate
from reconciler.sql import query
from reconciler.worker import Claim, LeaseLostError, claim_next, finish_job, heartbeat_job

SLICE_SEC = 0.03
IDLE_SEC = 0.15


class SimulatedWorker:
    def __init__(
        self, name: str, parent: int, lease_sec: float | None, beat_sec: float, conn: psycopg.Connection
    ) -> None:
        self.name = name
        self._parent = parent
        self._lease_sec = lease_sec
        self._beat_sec = beat_sec
        self._conn = conn
        # Odd workers look at one table first, even ones at the other: both queues move.
        number = int(name.rsplit("-", 1)[1])
        self._tables = TABLES if number % 2 else TABLES[::-1]

    def work_until_orphaned(self) -> None:
        self._say("ready")
        while self._has_parent():
            claim = self._claim()
            if claim is None:
                time.sleep(IDLE_SEC)
                continue
            try:
                self._run(claim)
            except LeaseLostError:
                self._say("fenced", claim)

    def _claim(self) -> Claim | None:
        for table in self._tables:
            for claim in claim_next(self._conn, table, self.name, lease_sec=self._lease_sec):
                return claim
        return None

    def _run(self, claim: Claim) -> None:
        self._say("claimed", claim)
        statement = query("demo", "task").format(table=psycopg.sql.Identifier(claim.table))
        row = self._conn.execute(statement, {"id": claim.id}).fetchone()
        if row is None:
            return  # somebody deleted the job: the final check will say so
        _, work_sec, fate = row
        if fate == Fate.POISON:
            self._pretend(claim, work_sec / 2)
            os.kill(os.getpid(), signal.SIGKILL)
        # The accident must strike in the middle of the work, on the slowest machine, too.
        awaits_accident = fate in (Fate.KILLED, Fate.HUNG) and claim.attempt == 1
        self._pretend(claim, float("inf") if awaits_accident else work_sec)
        with self._conn.transaction():
            output = {"table": claim.table, "id": claim.id, "attempt": claim.attempt, "worker": self.name}
            self._conn.execute(query("demo", "produce"), output)
            finish_job(self._conn, claim, success=True)
        self._say("finished", claim)

    def _pretend(self, claim: Claim, work_sec: float) -> None:
        """Spend the time a real job would, beating all the while."""
        began = beaten = time.monotonic()
        while self._has_parent() and (now := time.monotonic()) - began < work_sec:
            if now - beaten >= self._beat_sec:
                claim = heartbeat_job(self._conn, claim)
                beaten = now
            time.sleep(SLICE_SEC)
        if not self._has_parent():
            sys.exit(0)

    def _has_parent(self) -> bool:
        return os.getppid() == self._parent

    def _say(self, what: str, claim: Claim | None = None) -> None:
        line: dict[str, object] = {"what": what}
        if claim is not None:
            line |= {"table": claim.table, "id": claim.id, "attempt": claim.attempt}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def main() -> None:
    name, parent, lease, beat = sys.argv[1:5]
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True, application_name=name) as conn:
        worker = SimulatedWorker(name, int(parent), float(lease) if lease else None, float(beat), conn)
        worker.work_until_orphaned()


if __name__ == "__main__":
    main()
