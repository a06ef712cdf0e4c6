"""Where ends are written: in groups, or beside ``on_finish`` each in a transaction of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..conf import settings
from ..events import FinishEvent
from ..transitions.outcomes import FinishReport, Outcome
from . import connections
from .described import log_raised, named
from .finisher import Finisher, longest_wait, unless_lost, without_content
from .heartbeat import BUSY_WAIT_SECONDS
from .held import Held
from .on_finish import OnFinish, OnFinishFailed, finish_announced, on_finish_of
from .pulse import Pulse
from .slots import refresh
from .stalls import Watched
from .supervised import backoff, is_transient

logger = logging.getLogger("django_durable_jobs.worker")

# Between two tries the job's row is free: time enough for a renewal that found it locked (4.3).
RENEWAL_SECONDS = 2 * BUSY_WAIT_SECONDS


class Ends:
    """Write what handlers did, until each job is written or lost.

    A job with ``on_finish`` is written by the slot that ran its handler: a slow one holds up
    that slot, and no other job's end.
    """

    def __init__(self, alias: str, settled: Callable[[list[Outcome], FinishReport], None]) -> None:
        self._alias = alias
        self._settled = settled
        self._settling = threading.Lock()
        self._finisher = Finisher(alias, self._settle)
        self._changed = threading.Condition()
        # By token: when (monotonic) the try that runs now began; None between two of them.
        self._alone: dict[str, float | None] = {}
        # Those whose on_finish does not end: nobody waits for them any more.
        self._stuck: set[str] = set()
        self._given_up = False

    @property
    def pulse(self) -> Pulse:
        return self._finisher.pulse

    @property
    def watched(self) -> Watched:
        return self._finisher.watched

    @property
    def stuck(self) -> frozenset[str]:
        """The tokens of the jobs whose ``on_finish`` was given up and has not come back."""
        with self._changed:
            return frozenset(self._stuck)

    def start(self) -> None:
        self._finisher.start()

    def put(self, held: Held, outcome: Outcome) -> None:
        """Take over an end from the slot whose thread this is."""
        on_finish = on_finish_of(held.job)
        if on_finish is None:
            self._finisher.put(outcome)
            return
        refresh()
        self._write(held, outcome, on_finish)

    def put_elsewhere(self, held: Held, outcome: Outcome) -> None:
        """Do as ``put`` for a handler that its slot's thread has not come back from."""
        on_finish = on_finish_of(held.job)
        if on_finish is None:
            self._finisher.put(outcome)
            return

        def write() -> None:
            try:
                self._write(held, outcome, on_finish)
            finally:
                connections.close_all()

        self._tries(held, None)
        threading.Thread(target=write, name="durable-on-finish", daemon=True).start()

    def gives_up(self, held: Held, *, in_all: bool) -> bool:
        """Tell, once, that an ``on_finish`` does not end: nobody waits for it any more.

        ``in_all``: its tries count together. Each may end by a lock's time limit, while the lock
        is that of a thread of this process that does not end.
        """
        # What it waits for a lock before it is called is no time of its own.
        limit = held.job.timeout + float(settings.TIMEOUT_GRACE_SECONDS) + longest_wait()
        before = held.told_seconds if in_all else 0.0
        with self._changed:
            seconds = self._seconds(held)
            if not seconds or before + seconds <= limit:
                return False
            del self._alone[held.job.token]
            self._stuck.add(held.job.token)
            self._changed.notify_all()
            return True

    def runs_on(self, held: Held) -> bool:
        """Tell, at a shutdown, an ``on_finish`` that takes longer than a handler may then."""
        with self._changed:
            return self._seconds(held) > float(settings.TIMEOUT_GRACE_SECONDS) + longest_wait()

    def stop(self, timeout: float) -> bool:
        """Write what is left and end; False if that took longer than ``timeout`` seconds."""
        end = time.monotonic() + timeout
        written = self._finisher.stop(timeout)
        with self._changed:
            left = max(0.0, end - time.monotonic())
            written &= self._changed.wait_for(lambda: not self._alone, left)
            self._given_up = True
        return written

    def _write(self, held: Held, outcome: Outcome, on_finish: OnFinish) -> None:
        """Try until the end is written, refused or lost; then nobody renews the job any more."""
        report = FinishReport()
        try:
            report = self._until_written(held, outcome, on_finish)
        except OnFinishFailed as failed:
            log_raised(f"the on_finish of {named(held.job)}", failed.__cause__ or failed)
            logger.error("%s is left to its lease: its end is not written", named(held.job))
        finally:
            self._settle([outcome], report)
            with self._changed:
                self._alone.pop(held.job.token, None)
                self._stuck.discard(held.job.token)
                self._changed.notify_all()

    def _until_written(self, held: Held, outcome: Outcome, on_finish: OnFinish) -> FinishReport:
        """Write an end with its content, else without it."""
        for one in (outcome, without_content(outcome)):
            try:
                return self._while_busy(held, one, on_finish)
            except OnFinishFailed:
                raise
            # A hook of its transaction.on_commit() may raise anything: the next try finds the
            # end written.
            except BaseException as error:
                connections.clean()
                log_raised(f"the end of {named(held.job)}", error)
        logger.error("%s could not be finished; its lease brings it back", named(held.job))
        return FinishReport()

    def _while_busy(self, held: Held, outcome: Outcome, on_finish: OnFinish) -> FinishReport:
        """Wait out what a database may do to us, the lease being renewed between two tries."""
        failures = 0
        while not self._given_up and held.job.token not in self._stuck:
            report = self._try(held, outcome, on_finish)
            if not report.busy:
                return report
            failures += 1
            time.sleep(max(backoff(failures), RENEWAL_SECONDS))
        return FinishReport()

    def _try(self, held: Held, outcome: Outcome, on_finish: OnFinish) -> FinishReport:
        self._tries(held, time.monotonic())
        try:
            return finish_announced(
                self._alias,
                held.job,
                outcome,
                _timed(held, on_finish),
                lock_timeout=longest_wait(),
            )
        except Exception as error:
            connections.clean()
            if not is_transient(self._alias, error):
                raise
            name = type(error).__name__
            logger.warning("the end of %s waits for the database: %s", named(held.job), name)
        finally:
            self._tries(held, None)
        return unless_lost(self._alias, outcome)

    def _tries(self, held: Held, since: float | None) -> None:
        with self._changed:
            if held.job.token not in self._stuck:
                self._alone[held.job.token] = since

    def _seconds(self, held: Held) -> float:
        """How long the try that runs now has taken."""
        since = self._alone.get(held.job.token)
        return 0.0 if since is None else time.monotonic() - since

    def _settle(self, ended: list[Outcome], report: FinishReport) -> None:
        with self._settling:
            self._settled(ended, report)


def _timed(held: Held, on_finish: OnFinish) -> OnFinish:
    """Count the seconds that it takes itself, in all its tries."""

    def timed(event: FinishEvent) -> None:
        began = time.monotonic()
        try:
            on_finish(event)
        finally:
            held.told_seconds += time.monotonic() - began

    return timed
