"""Beater: the thread that beats all held jobs, on a connection of its own.

One UPDATE per table and round. A row that somebody locks is skipped there and handed to a waiter
(waiters.py), which stands in that row's lock queue; the others never wait for it.
Neither a busy event loop nor a busy handler thread stops the beats; code that holds the GIL for long does,
and for that the same thread can live in a process of its own (beat_process.py).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

import psycopg
from psycopg import errors as pg

from reconciler.errors import ReaperError
from reconciler.worker import metrics
from reconciler.worker.beat import BatchBeat, heartbeat_batch, heartbeat_job
from reconciler.worker.claim import Claim
from reconciler.worker.errors import LeaseLostError
from reconciler.worker.keeper import Keeper, Key
from reconciler.worker.sdk import Sdk
from reconciler.worker.session import LOST_CONNECTION, Session
from reconciler.worker.waiters import Waiters

MIN_PAUSE_SEC = 0.25
_log = logging.getLogger(__name__)


class Beater:
    """Beats until stopped. `may_beat` can forbid a round (a stopped parent does not look alive).

    `on_ready` hears whether beats come through: a worker that cannot beat must not claim.
    """

    def __init__(
        self,
        dsn: str,
        keeper: Keeper,
        sdk: Sdk,
        *,
        may_beat: Callable[[], bool] = lambda: True,
        on_ready: Callable[[bool], None] = lambda ready: None,
    ) -> None:
        self._dsn = dsn
        self._keeper = keeper
        self._sdk = sdk
        self._may_beat = may_beat
        self._on_ready = on_ready
        self._contact = False
        self._last = time.monotonic()
        self._session = Session(dsn, "beat")
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._failures = 0
        self._refused: set[Key] = set()
        self._waiters = Waiters(dsn, keeper, sdk)
        self._thread = threading.Thread(target=self._run, name="job-reaper-beater", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Stop beating: only when no job is held any more."""
        self._stopping.set()
        self._wake.set()
        self._session.cut()
        self._waiters.stop()
        self._thread.join(5)
        self._session.close()

    def poke(self) -> None:
        """The set of jobs changed: a short lease may need a beat sooner than planned."""
        self._wake.set()

    def ready(self) -> bool:
        """Is it beating, on a connection that works? Also asked by a worker that holds no job yet."""
        return self._contact and self._thread.is_alive()

    def catch_up(self) -> None:
        """Nothing to hear from elsewhere: this thread tells the keeper itself."""

    # ── the rounds ──────────────────────────────────────────────────────────────────────────────────

    def interval_sec(self) -> float:
        """Every HEARTBEAT_SEC, and at least three times per lease."""
        lease = self._keeper.shortest_lease_sec()
        interval = float(self._sdk.policy.heartbeat_sec)
        return interval if lease is None else max(0.05, min(interval, lease / 3))

    def _run(self) -> None:
        first = True
        while not self._stopping.is_set():
            try:
                if not first:
                    self._wait()
                first = False  # at once: the connection is there before the first claim
                if not self._stopping.is_set() and self._may_beat():
                    self.beat_once()
            except Exception as error:  # noqa: BLE001 - a beater that ends loses every job; logged
                self._failed(error)
                self._stopping.wait(MIN_PAUSE_SEC)

    def _wait(self) -> None:
        # Early by up to 15 %, never late, also on a busy machine: 15 s is the longest the requirement
        # allows. Jittered, because a fleet started at once must not beat at once for ever.
        pause = self._pause_sec() * random.uniform(0.85, 0.95)  # noqa: S311 - jitter
        due = self._last + pause
        while not self._stopping.is_set() and (left := due - time.monotonic()) > 0:
            if self._wake.wait(left):
                self._wake.clear()
                due = min(due, self._last + self._pause_sec())
        metrics.BEAT_LAG.set(max(0.0, time.monotonic() - due))
        self._last = time.monotonic()

    def _pause_sec(self) -> float:
        # After failures: soon again, then slower, but never slower than the usual pace.
        interval = self.interval_sec()
        return min(interval, MIN_PAUSE_SEC * 2 ** min(self._failures, 6)) if self._failures else interval

    def beat_once(self) -> bool:
        """One round over all held jobs. True when the database confirmed it."""
        sent_at = time.monotonic()
        claims = self._keeper.claims()
        return self._beat(claims, sent_at) if claims else self._ping()

    def _ping(self) -> bool:
        """Nothing to beat: hold the connection, and know that it works before anything is claimed."""
        try:
            self._session.run(lambda conn: conn.execute("SELECT 1"), limit_sec=self._limit_sec())
        except (psycopg.Error, OSError) as error:
            self._failed(error)
            return False
        self._answered()
        return True

    def _beat(self, claims: list[Claim], sent_at: float) -> bool:
        limit = self._limit_sec()
        try:
            beats = self._session.transact(
                lambda conn: heartbeat_batch(conn, claims, sdk=self._sdk),
                timeout_sec=limit,
                lock_timeout_sec=limit / 2,
            )
        except (*LOST_CONNECTION, OSError) as error:
            self._failed(error)
            return False
        except (psycopg.Error, ReaperError) as error:
            # A row refuses (a trigger, a table that lost a column). It must not stop the beats of the others:
            # halve until it stands alone.
            if len(claims) == 1:
                return self._beat_alone(claims[0], sent_at, error)
            middle = len(claims) // 2
            first, second = self._beat(claims[:middle], sent_at), self._beat(claims[middle:], sent_at)
            return first and second
        self._succeeded(beats, sent_at)
        return True

    def _beat_alone(self, claim: Claim, sent_at: float, refused: Exception) -> bool:
        """The plainest beat, for a row that the batch's statement cannot serve."""
        limit = self._limit_sec()
        try:
            renewed = self._session.transact(
                lambda conn: heartbeat_job(conn, claim, sdk=self._sdk),
                timeout_sec=limit,
                lock_timeout_sec=limit / 2,
            )
        except LeaseLostError as error:
            self._keeper.lost(claim, error, "fenced")
        except (psycopg.Error, ReaperError, OSError):
            self._failed(refused, claim)
            return False
        else:
            self._keeper.renewed(renewed, sent_at)
        return True

    def _succeeded(self, beats: BatchBeat, sent_at: float) -> None:
        metrics.HEARTBEATS.add(1)
        self._answered()
        for claim in beats.beaten:
            self._keeper.renewed(claim, sent_at)
        for claim in beats.lost:
            self._keeper.lost(claim, claim.lost(), "fenced")
        self._waiters.hand_over(beats.busy, (*beats.beaten, *beats.lost))

    def _answered(self) -> None:
        if self._failures:
            _log.info("heartbeat works again", extra={"failures": self._failures})
            self._failures = 0
        self._tell(ready=True)

    def _tell(self, *, ready: bool) -> None:
        if self._contact != ready:
            self._contact = ready
            self._on_ready(ready)

    def _failed(self, error: Exception, claim: Claim | None = None) -> None:
        metrics.HEARTBEAT_FAILURES.add(1)
        about = {} if claim is None else {"job_id": str(claim.id), "table": claim.table}
        about["error"] = str(error).strip()
        if claim is None:
            once = self._failures == 0
            self._failures += 1
        else:
            once = claim.key not in self._refused
            self._refused.add(claim.key)
        if once and not self._stopping.is_set():  # once: an outage must not fill the log
            unexpected = not isinstance(error, (psycopg.Error, ReaperError, OSError))
            _log.warning(
                "heartbeat failed, trying again", extra=about, exc_info=error if unexpected else None
            )
        # A lock or a time limit is an answer of the server: only without one there is nothing to beat with.
        if claim is None and not isinstance(error, (pg.LockNotAvailable, pg.QueryCanceled)):
            self._tell(ready=False)

    def _limit_sec(self) -> float:
        return max(1.0, self.interval_sec())
