"""Renew all held leases in one statement, and pass cancel requests on to handlers."""

from __future__ import annotations

import logging
import time
from functools import partial

from django.db import DatabaseError

from ..conf import settings
from ..dialects import dialect_for
from ..exceptions import LockTimeout
from ..transitions._fence import GONE, standings
from ..transitions.leases import cancel_requests, renew
from . import connections
from .held import Held, HeldJobs
from .stalls import longest_renewal
from .supervised import Loop, is_transient

logger = logging.getLogger("django_durable_jobs.worker")

BUSY_WAIT_SECONDS = 0.1


class Heartbeat:
    """Two steps for two loops, each on a connection of its own (CONTRACT 4.3, 3.5).

    ``damaged`` counts the held jobs that were found without their open attempt row.
    """

    def __init__(self, alias: str, held: HeldJobs) -> None:
        self.damaged = 0
        self._alias = alias
        self._held = held
        self._some_busy = False

    def loops(self) -> list[Loop]:
        """Give the renewal, and the watch for cancels."""
        return [
            Loop(
                "renewal",
                self._alias,
                self.renew,
                interval=self.interval,
                longest_backoff=float(settings.LEASE_SECONDS) / 6,
                longest_answer=longest_renewal,
            ),
            Loop(
                "cancel watch",
                self._alias,
                self.watch_cancels,
                interval=partial(float, settings.POLL_SECONDS),
            ),
        ]

    def interval(self) -> float:
        """A third of the lease; sooner while a row that we own is locked by somebody."""
        third = float(settings.LEASE_SECONDS) / 3
        return min(third, BUSY_WAIT_SECONDS) if self._some_busy else third

    def renew(self) -> None:
        """Prolong the leases. A row that is missing is read again: only then is it lost.

        Not that of a handler past the hard limit: an end that its own transaction keeps from
        being written is not waited for longer than the lease that it had (CONTRACT 4.5).
        """
        held = [one for one in self._held.all() if not one.overdue]
        if not held:
            self._some_busy = False
            return
        pairs = [(one.job.id, one.job.token) for one in held]
        renewed = self._renewed(pairs)
        now = time.monotonic()
        for one in held:
            if one.job.token in renewed:
                one.leased_at = now
        missed = [one for one in held if one.job.token not in renewed]
        self._some_busy = bool(missed) and self._still_owned(missed)

    def _renewed(self, pairs: list[tuple[int, str]]) -> set[str]:
        """Renew together; where a row is refused or waits too long, the others without it.

        Not where the database as a whole is away, or locked as SQLite's is by its one writer.
        """
        try:
            return renew(self._alias, pairs, lease_seconds=settings.LEASE_SECONDS)
        except (DatabaseError, LockTimeout) as error:
            is_away = is_transient(self._alias, error)
            if len(pairs) == 1 or (is_away and not dialect_for(self._alias).blames_row(error)):
                raise
            connections.clean()
            return self._halves(pairs)

    def _halves(self, pairs: list[tuple[int, str]]) -> set[str]:
        renewed: set[str] = set()
        half = len(pairs) // 2
        for some in (pairs[:half], pairs[half:]):
            try:
                renewed |= self._renewed(some)
            except LockTimeout:
                connections.clean()
                logger.warning("the lease of job %d waits for a lock", some[0][0])
            except DatabaseError:
                connections.clean()
                logger.exception("the lease of job %d cannot be renewed", some[0][0])
        return renewed

    def _still_owned(self, missed: list[Held]) -> bool:
        found = standings(self._alias, [(one.job.id, one.job.token) for one in missed])
        busy = False
        for one in missed:
            standing = found.get(one.job.token, GONE)
            if standing.owns and standing.attempt_open:
                busy = True
            elif standing.owns:
                self._report_damaged(one)
            elif one.ended or one.ctx.completed:
                # Its end may be committed already, or about to be: who writes it is told.
                continue
            elif one.job.token in {still.job.token for still in self._held.all()}:
                _lose(one)
        return busy

    def lose_expired(self) -> None:
        """Tell the handlers whose lease must be over since no renewal gets through; asks nobody."""
        latest = time.monotonic() - float(settings.LEASE_SECONDS)
        for one in self._held.all():
            if one.begun and not one.ended and not one.ctx.completed and one.leased_at < latest:
                _lose(one)

    def _report_damaged(self, one: Held) -> None:
        """Say once that a job cannot be renewed: not lost yet, but once its lease is over.

        Tried again with every renewal, not sooner: nobody holds a lock that may be let go.
        """
        if not one.damaged:
            one.damaged = True
            self.damaged += 1
            logger.error("job %s has no open attempt row; its lease is not renewed", one.job.job_id)

    def watch_cancels(self) -> None:
        """Ask once for all held jobs whether a cancel was requested."""
        held = [one for one in self._held.all() if not one.ctx.cancel_requested]
        wanted = cancel_requests(self._alias, [(one.job.id, one.job.token) for one in held])
        for one in held:
            if one.job.token in wanted:
                one.ctx.mark_cancel_requested()


def _lose(one: Held) -> None:
    one.ctx.mark_lost()
    if not one.lost:
        one.lost = True
        logger.warning("job %s: the lease is lost", one.job.job_id)
