"""Waiters: a few threads that each stand in one locked row's queue, so that its beat comes through.

A row that somebody holds long must not keep the others from their turn: each waits for a part of the time its
lease leaves it, then the row that waited least goes next, and among equals the one nearest to its fence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psycopg
from psycopg import errors as pg

from reconciler.errors import ReaperError
from reconciler.worker import metrics
from reconciler.worker.beat import heartbeat_job
from reconciler.worker.claim import Claim
from reconciler.worker.errors import LeaseLostError
from reconciler.worker.keeper import Keeper, Key
from reconciler.worker.sdk import Sdk
from reconciler.worker.session import Session

MAX_WAITERS = 4
LAST_TURN_SEC = 1.5
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """A locked row: how often it waited in vain, and the connection it waits on now."""

    claim: Claim
    turns: int = 0
    session: Session | None = None


class Waiters:
    """Beats locked rows singly. Every method may be called from any thread."""

    def __init__(self, dsn: str, keeper: Keeper, sdk: Sdk) -> None:
        self._dsn = dsn
        self._keeper = keeper
        self._sdk = sdk
        self._rows: dict[Key, _Row] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def hand_over(self, busy: Iterable[Claim], settled: Iterable[Claim]) -> None:
        """What a round found: rows to wait for, and rows that need no waiting any more."""
        with self._lock:
            for claim in settled:
                row = self._rows.get(claim.key)
                if row is not None and row.session is None:
                    del self._rows[claim.key]
            for claim in busy:
                self._rows.setdefault(claim.key, _Row(claim)).claim = claim
        self._fill()

    def stop(self) -> None:
        """End all waits."""
        with self._lock:
            self._stopped = True
            waiting = [row.session for row in self._rows.values() if row.session is not None]
        for session in waiting:
            session.cut()

    def _fill(self) -> None:
        while (row := self._next()) is not None:
            try:
                threading.Thread(
                    target=self._wait_for, args=(row,), name="job-reaper-waiter", daemon=True
                ).start()
            except RuntimeError as error:  # no thread to be had: the next round hands it over again
                with self._lock:
                    self._rows.pop(row.claim.key, None)
                _log.warning("cannot wait for a locked row", extra={"error": str(error)})
                return

    def _next(self) -> _Row | None:
        with self._lock:
            idle = {key: row for key, row in self._rows.items() if row.session is None}
            if self._stopped or len(self._rows) - len(idle) >= MAX_WAITERS:
                return None
            left = {key: self._keeper.sec_to_fence(row.claim) for key, row in idle.items()}
            for key, seconds in left.items():
                if seconds <= 0:  # ended or fenced meanwhile
                    del self._rows[key], idle[key]
            if not idle:
                return None
            row = min(idle.values(), key=lambda row: (row.turns, left[row.claim.key]))
            row.session = Session(self._dsn, "beat, waiting for a row")
            return row

    def _wait_for(self, row: _Row) -> None:
        claim, session = row.claim, row.session
        assert session is not None
        sent_at = time.monotonic()
        patience = self._keeper.sec_to_fence(claim)
        turn = patience if patience <= LAST_TURN_SEC else max(LAST_TURN_SEC, patience / 3)
        again = False
        try:
            renewed = session.transact(
                lambda conn: heartbeat_job(conn, claim, sdk=self._sdk),
                timeout_sec=turn + 1,
                lock_timeout_sec=turn,
            )
            self._keeper.renewed(renewed, sent_at)
        except LeaseLostError as error:
            self._keeper.lost(claim, error, "fenced")
        except (psycopg.Error, ReaperError, OSError) as error:
            again = turn < patience and isinstance(error, pg.LockNotAvailable)
            if not again and not self._stopped:
                metrics.HEARTBEAT_FAILURES.add(1)
                _log.warning(
                    "heartbeat of a locked row failed",
                    extra={"job_id": str(claim.id), "table": claim.table, "error": str(error).strip()},
                )
        finally:
            session.close()
            with self._lock:
                row.session = None
                row.turns += 1
                if not again:
                    self._rows.pop(claim.key, None)
        self._fill()
