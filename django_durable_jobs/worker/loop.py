"""The worker: claim for free slots, run, finish; until told to stop, or until nothing is due."""

from __future__ import annotations

import logging
import math
import os
import queue
import random
import time
from contextlib import suppress
from typing import Any

from .. import __version__, states
from ..conf import settings
from ..dialects import dialect_for
from ..dialects.base import Lane
from ..exceptions import LockTimeout
from ..transitions._limits import Patience
from ..transitions.claims import ClaimedJob, claim
from ..transitions.outcomes import FinishReport, Outcome
from ..words import counted
from . import connections
from .blocking import block
from .calls import Caller
from .chores import Chores
from .described import log_timeout
from .ends import Ends
from .execution import Dispatch, context_for, execute, prepare
from .freed import FreedPlaces
from .heartbeat import Heartbeat
from .held import Held, HeldJobs
from .lanes import FRESH_SECONDS, RunnableLanes
from .lifeline import ChildEnd
from .lifetime import HeartbeatFile, Lifetime
from .log import Ended, log_ends, log_group
from .options import WorkerOptions
from .overdue import HardLimit
from .passes import Serving, own_capabilities, run_passes
from .presence import Presence
from .pulse import Pulse
from .scheduling import Scheduling
from .shutdown import END_SECONDS, LAST_SECONDS, Shutdown
from .slots import Slots
from .stalls import Watched, longest_answer, longest_pass
from .supervised import Loop, backoff, is_transient, stop_all
from .wakeup import SECOND_LOOK_SECONDS, WakeUp

logger = logging.getLogger("django_durable_jobs.worker")

# Of a claim that only sends jobs to wait, before it says so and can be stopped.
LONGEST_CLAIM_SECONDS = 1.0
# A job that has begun meanwhile may be overdue sooner than those known at the last look.
HARD_LIMIT_SECONDS = 0.5

# The thread of a lost slot may hold what every claim waits for, as on SQLite the one writer.
BEARABLE_LOCK_TIMEOUTS = 2

DRAINED, CRASHED, BAD_OPTIONS, MIGRATIONS_MISSING, GAVE_UP, KILLED = range(6)


class Worker:
    """One worker in this process: its slots, its loops and its claims.

    ``run()`` blocks until the end and gives the exit code of CONTRACT 4.7. ``stop()`` may be
    called from any thread and from a signal handler.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        owns_process: bool = False,
        parent: ChildEnd | None = None,
        heartbeat_file: HeartbeatFile | None = None,
    ) -> None:
        self.options = options
        self._parent = parent
        self._heartbeat_file = heartbeat_file
        self._lifetime = Lifetime(seconds=options.max_runtime, mebibytes=options.max_memory)
        self.finished = 0
        self._alias = options.alias
        self._stopping = False
        self._claimed = 0
        self._failures = 0
        self._lock_timeouts = 0
        # Put to, never locked: a signal handler may interrupt the very thread that waits.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._serving = Serving(
            queues=options.queues,
            excluded_queues=options.excluded_queues,
            handlers=own_capabilities(),
        )
        self._lanes = RunnableLanes(
            self._alias,
            self._serving,
            fresh_seconds=0 if options.until_idle else FRESH_SECONDS,
        )
        self._presence = Presence(options, self._serving, self._health)
        self._pulse = Pulse("claim")
        longest = longest_pass if options.until_idle else longest_answer
        self._watched = Watched("the claim loop", self._alias, longest)
        self._chores = Chores(self._alias, self._make_passes, self._find)
        self._held = HeldJobs()
        self._freed = FreedPlaces(self._alias, self._serving)
        self._call = Caller()
        self._slots = Slots(options.threads, self._run_job, freed=self._nudge)
        self._ends = Ends(self._alias, self._settle)
        self._hard_limit = HardLimit(self._held, self._ends, self._forget)
        self._shutdown = Shutdown(
            self._alias,
            held=self._held,
            ends=self._ends,
            slots=self._slots,
            hard_limit=self._hard_limit,
            watched=self._watched,
            owns_process=owns_process,
            is_stopping=lambda: self._stopping,
            wait=self._wait_for_a_nudge,
        )
        heartbeat = self._heartbeat = Heartbeat(self._alias, self._held)
        self._second_look = math.inf
        self._loops = [*heartbeat.loops(), self._limits_loop()]
        if not options.once:
            # A drain is a live worker too: others leave to it what only it can run.
            self._loops += [self._chores.loop, self._presence.loop]
        if options.fires_schedules:
            scheduling = Scheduling(
                self._alias, fired=self._nudge, is_stopping=lambda: self._stopping
            )
            self._loops.append(scheduling.loop)
        if not options.until_idle and settings.NOTIFY:
            self._listen()

    def _limits_loop(self) -> Loop:
        return Loop(
            "hard limit",
            self._alias,
            self._look_at_limits,
            interval=lambda: min(HARD_LIMIT_SECONDS, self._hard_limit.interval()),
        )

    def _listen(self) -> None:
        listener = dialect_for(self._alias).listener(self._alias)
        if listener is not None:
            wake_up = WakeUp(listener, self._serving, self._hear)
            self._loops.append(Loop("listen", self._alias, wake_up.step, interval=lambda: 0))

    def stop(self) -> None:
        """Claim and schedule nothing more and let the handlers finish (CONTRACT 4.7)."""
        self._stopping = True
        self._nudge()

    def run(self) -> int:
        self._slots.start()
        self._ends.start()
        for loop in self._loops:
            loop.start()
        code = CRASHED
        with connections.own(self._alias, patient=self.options.until_idle):
            try:
                self._work()
                if self._parent is not None and self._is_replaced():
                    self._parent.retire()
                code = DRAINED if self._shutdown.run() else GAVE_UP
            finally:
                self._end(code)
        return code

    def _end(self, code: int) -> None:
        # Threads that are left behind may hold what ours wait for.
        patience = LAST_SECONDS if code == GAVE_UP else END_SECONDS
        stop_all(self._loops, patience)
        self._call.stop()
        self._presence.leave(patience=patience)
        finished = counted(self.finished, "attempt")
        logger.info("worker %s ends; it finished %s", self.options.name, finished)

    def _health(self) -> dict[str, Any]:
        """What the worker's row says of it, as JSON (CONTRACT 4.9)."""
        return {
            "version": __version__,
            "slots": self._slots.count,
            "lost_slots": self._hard_limit.lost_slots,
            "held": len(self._held),
            "finished": self.finished,
            "loops": {one.name: one.health() for one in self._pulses()},
        }

    def _pulses(self) -> list[Pulse]:
        return [self._pulse, self._ends.pulse, *self._loops]

    # -- claiming

    def _work(self) -> None:
        """Claim whenever slots are free; wait for the poll interval once nothing was left."""
        while not self._stopping and not self._had_enough() and not self._is_replaced():
            try:
                was_idle = self._is_idle()
                with self._watched.waiting():
                    if self.options.until_idle and was_idle:
                        more = self._pass_and_claim()
                    else:
                        more = self._claim()
                self._failures = self._lock_timeouts = 0
                self._pulse.succeeded()
            except Exception as error:
                self._survive(error)
                continue
            if self.options.once:
                return
            if self.options.drain and was_idle and not more and self._is_idle():
                return
            self._wait(more)

    def _pass_and_claim(self) -> bool:
        """Never beside the chores: what these are moving is locked, and would be passed over."""
        with self._chores.turn:
            self._lanes.know(run_passes(self._alias, self._serving, patient=False))
            return self._claim()

    def _nudge(self) -> None:
        self._wake.put(None)

    def _hear(self) -> None:
        self._second_look = time.monotonic() + SECOND_LOOK_SECONDS
        self._nudge()

    def _had_enough(self) -> bool:
        limit = self.options.max_jobs
        return limit is not None and self._claimed >= limit

    def _is_worn_out(self) -> bool:
        """Tell whether stuck threads cost this process: the first does where it is replaced.

        So it does where nothing can be claimed beside it.
        """
        is_first = self._parent is not None or self._lock_timeouts >= BEARABLE_LOCK_TIMEOUTS
        bearable = 1 if is_first else self._slots.count
        return self._hard_limit.lost_slots >= bearable

    def _is_replaced(self) -> bool:
        """Tell whether another process is to go on."""
        return self._is_worn_out() or self._lifetime.is_over

    def _is_idle(self) -> bool:
        return len(self._held) == 0

    def _capacity(self) -> int:
        """Free slots; fewer while ends wait to be written, so that no backlog of them grows."""
        room = min(self._slots.free, 2 * self._slots.count - len(self._held))
        if self.options.max_jobs is not None:
            room = min(room, self.options.max_jobs - self._claimed)
        return max(0, room)

    def _claim(self) -> bool:
        """Claim for the free slots; tell whether there may be more at once."""
        if time.monotonic() >= self._second_look:
            self._second_look = math.inf
        capacity = self._capacity()
        if not capacity:
            return True
        self._freed.let_in()
        known_before = self._lanes.is_fresh()
        jobs = claim(
            self._alias,
            self._lanes.get(),
            limit=capacity,
            worker=self.options.name,
            lease_seconds=settings.LEASE_SECONDS,
            patience=(patience := Patience(LONGEST_CLAIM_SECONDS)),
        )
        self._claimed += len(jobs)
        self._start(jobs)
        if len(jobs) == capacity or patience.over:
            return True
        self._lanes.forget()
        return known_before

    def _wait(self, more: bool) -> None:
        """Wait for a slot, or for a look that finds something to claim."""
        if more and self._capacity():
            return
        self._pulse.rest()
        while not self._is_woken() and not self._is_look_due():
            continue
        self._pulse.begin()

    def _is_woken(self) -> bool:
        """Wait a poll interval at most; a little less, so that workers do not poll in step."""
        poll = float(settings.POLL_SECONDS) * random.uniform(0.9, 1)  # noqa: S311
        with suppress(queue.Empty):
            self._wake.get(timeout=max(0.0, min(poll, self._second_look - time.monotonic())))
            while not self._wake.empty():
                self._wake.get_nowait()
            return True
        return False

    def _is_look_due(self) -> bool:
        """The chores look for us as well, unless a long pass keeps them from it."""
        return time.monotonic() >= self._second_look or self._chores.is_look_overdue()

    def _survive(self, error: Exception) -> None:
        self._failures += 1
        self._lock_timeouts = self._lock_timeouts + 1 if isinstance(error, LockTimeout) else 0
        self._pulse.failed()
        if is_transient(self._alias, error):
            logger.warning("the claim loop waits for the database: %s", type(error).__name__)
        else:
            logger.exception("the claim loop failed and goes on", exc_info=error)
        connections.clean()
        self._rest(time.monotonic() + backoff(self._failures))

    def _rest(self, end: float) -> None:
        """Wait until that monotonic time, or until told to stop."""
        while not self._stopping and (left := end - time.monotonic()) > 0:
            self._wait_for_a_nudge(left)

    def _wait_for_a_nudge(self, seconds: float) -> None:
        with suppress(queue.Empty):
            self._wake.get(timeout=seconds)

    def _make_passes(self, *, recover: bool) -> list[Lane]:
        patient = not self.options.drain
        return run_passes(self._alias, self._serving, patient=patient, recover=recover)

    def _find(self, lanes: list[Lane]) -> None:
        self._lanes.know(lanes)
        self._nudge()

    def _look_at_limits(self) -> None:
        """The supervisor hears of us from here: no database and no handler holds this up."""
        self._hard_limit.step()
        self._heartbeat.lose_expired()
        for watched in (self._watched, self._ends.watched, *(one.watched for one in self._loops)):
            watched.break_off()
        if self._lifetime.look(has_worked=self._claimed > 0):
            self._nudge()
        if self._parent is not None:
            self._parent.beat()
        if self._heartbeat_file is not None:
            self._heartbeat_file.touch()

    # -- running

    def _start(self, jobs: list[ClaimedJob]) -> None:
        held = []
        for job in jobs:
            try:
                held.append(Held(job=job, ctx=context_for(self._alias, job)))
            except Exception:
                # A damaged row; its neighbours begin, and its lease brings it back.
                logger.exception("job %d cannot begin", job.id)
        self._held.add(held)
        self._slots.give(held)

    def _run_job(self, held: Held) -> None:
        """One job in its slot, and its end."""
        # Told to stop, a job that has not begun is left for the shutdown to give back.
        if self._stopping or not self._held.begin(held):
            return
        outcome = None
        try:
            outcome = self._outcome_of(held)
        finally:
            self._let_go(held, outcome)

    def _let_go(self, held: Held, outcome: Outcome | None) -> None:
        """Pass the end on; after a fault of ours there is none, and the lease brings it back."""
        is_first = self._held.end(held)
        try:
            if outcome is not None and is_first:
                self._ends.put(held, outcome)
                # Not before: the project's logging may raise.
                if outcome.status == states.TIMED_OUT:
                    log_timeout(held.job)
            elif is_first:
                self._forget(held)
        finally:
            self._hard_limit.came_back(held)

    def _forget(self, held: Held) -> None:
        """Leave a job to its lease."""
        self._remove([held.job.token])
        self._nudge()

    def _remove(self, tokens: list[str]) -> dict[str, Held]:
        held = self._held.remove(tokens)
        self._freed.add(one.job for one in held.values())
        return held

    def _outcome_of(self, held: Held) -> Outcome | None:
        """Run the handler; None where there is no end to write, or it is written already."""
        dispatch = prepare(held.job)
        if not isinstance(dispatch, Dispatch):
            block(self._alias, held, dispatch)
            return None
        process = os.getpid()
        outcome = execute(dispatch, held.ctx, self._call)
        if os.getpid() != process:
            # The handler forked and its child came back here: the job is its parent's.
            os._exit(CRASHED)
        if held.ctx.stands:
            self.finished += 1
            if logger.isEnabledFor(logging.INFO):
                log_ends([Ended.of(held, states.RETURNED, states.SUCCEEDED)])
        return outcome

    def _settle(self, ended: list[Outcome], report: FinishReport) -> None:
        """Let go of the jobs whose end is written, or that are not ours any more."""
        held = self._remove([outcome.token for outcome in ended])
        self.finished += len(report.written)
        log_group(held, ended, report)
        self._chores.notice_retries(ended, report)
        self._nudge()
