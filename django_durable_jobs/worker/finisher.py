"""Write outcomes in groups: those that arrive while a group is written go together in the next."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ..conf import settings
from ..exceptions import LockTimeout
from ..transitions.outcomes import FinishReport, Outcome, finish, found
from . import connections
from .pulse import Pulse
from .stalls import Watched, longest_answer
from .supervised import backoff, is_transient

logger = logging.getLogger("django_durable_jobs.worker")

GROUP = 500
BUSY_WAIT_SECONDS = 0.05
# What one busy end may hold up the others for, each time it is tried.
ALONE_WAIT_SECONDS = 0.25


class Finisher:
    """One thread that writes what handlers did, until each job is written or lost."""

    def __init__(self, alias: str, settled: Callable[[list[Outcome], FinishReport], None]) -> None:
        self.pulse = Pulse("finish")
        self.watched = Watched("the finisher", alias, longest_answer)
        self._alias = alias
        self._settled = settled
        self._ready = threading.Condition()
        self._arrived: list[Outcome] = []
        self._busy: list[Outcome] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="durable-finisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, outcome: Outcome) -> None:
        with self._ready:
            self._arrived.append(outcome)
            self._ready.notify()

    def stop(self, timeout: float) -> bool:
        """Write what is left and end; False if that took longer than ``timeout`` seconds."""
        with self._ready:
            self._stopping = True
            self._ready.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with connections.own(self._alias):
                self._write_all()
        finally:
            connections.close_all()

    def _write_all(self) -> None:
        while (group := self._next_group()) is not None:
            left = [*group, *self._busy]
            try:
                self._write(group)
            except Exception:
                # A fault of ours must not end the thread, nor lose what it was to write. What
                # is written of it already is found so at the next try.
                logger.exception("the finisher failed and goes on")
                self._busy = left
                time.sleep(BUSY_WAIT_SECONDS)

    def _next_group(self) -> list[Outcome] | None:
        """What has arrived; an empty group where only busy ones are due for another try."""
        with self._ready:
            while not self._arrived:
                if self._busy:
                    self._ready.wait(BUSY_WAIT_SECONDS)
                    break
                if self._stopping:
                    return None
                self.pulse.rest()
                self._ready.wait()
            self.pulse.begin()
            group = self._arrived[:GROUP]
            del self._arrived[: len(group)]
            return group

    def _write(self, group: list[Outcome]) -> None:
        """Write a group, then try each busy one alone: none of them holds up the others."""
        busy, self._busy = self._busy, []
        if group:
            self._settle(group, self._together(group))
        for outcome in busy:
            self._settle([outcome], self._alone(outcome))

    def _settle(self, group: list[Outcome], report: FinishReport) -> None:
        self.pulse.succeeded()
        self._settled([one for one in group if one not in report.busy], report)
        self._busy += report.busy

    def _together(self, group: list[Outcome]) -> FinishReport:
        in_a_row = 0
        while True:
            try:
                with self.watched.waiting():
                    return finish(self._alias, group, lock_timeout=longest_wait())
            except Exception as error:
                in_a_row += 1
                self.pulse.failed()
                connections.clean()
                if isinstance(error, LockTimeout):
                    logger.warning("a group of %d ends met a lock; each goes alone", len(group))
                    return self._one_by_one(group)
                if not is_transient(self._alias, error):
                    logger.exception("a group of %d outcomes could not be written", len(group))
                    return self._one_by_one(group)
                logger.warning("the finisher waits for the database: %s", type(error).__name__)
                time.sleep(backoff(in_a_row))

    def _one_by_one(self, group: list[Outcome]) -> FinishReport:
        """Write each alone, so that one refused by the database does not hold up the others."""
        whole = FinishReport()
        for outcome in group:
            whole.add(self._alone(outcome))
        return whole

    def _alone(self, outcome: Outcome) -> FinishReport:
        """Write one with its content, else without it; later, if the database is away."""
        wait = min(ALONE_WAIT_SECONDS, longest_wait())
        for one in (outcome, without_content(outcome)):
            try:
                with self.watched.waiting():
                    return finish(self._alias, [one], lock_timeout=wait)
            except Exception as error:
                connections.clean()
                if is_transient(self._alias, error):
                    with self.watched.waiting():
                        return unless_lost(self._alias, outcome)
                logger.exception("the outcome of job %d could not be written", outcome.job)
        logger.error("job %d could not be finished; its lease brings it back", outcome.job)
        return FinishReport(damaged=[outcome])


def unless_lost(alias: str, outcome: Outcome) -> FinishReport:
    """Have an end tried again while its lease holds, or while the database cannot say so."""
    try:
        return found(alias, outcome)
    except Exception as error:
        connections.clean()
        if not is_transient(alias, error):
            raise
        return FinishReport(busy=[outcome])


def without_content(outcome: Outcome) -> Outcome:
    """Give an end without what a database may refuse about it."""
    return replace(outcome, result=None, error_summary=None, error_traceback=None)


def longest_wait() -> float:
    """A sixth of the lease at most: while a finish waits it holds job rows from renewal (4.3)."""
    return min(float(settings.LOCK_TIMEOUT_SECONDS), float(settings.LEASE_SECONDS) / 6)
