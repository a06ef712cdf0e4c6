"""A parent that keeps P worker processes at work, and ends those that do not end themselves."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ..words import counted
from .lifeline import ChildEnd, ParentEnd, lifeline
from .lifetime import HeartbeatFile
from .loop import CRASHED, DRAINED, GAVE_UP
from .signals import Stop, children_waited_for, held_back, stop_on_signal

logger = logging.getLogger("django_durable_jobs.worker")

TICK_SECONDS = 0.2
# A pause of ours, or of the whole machine, counts for so much at most.
LONGEST_TICK_SECONDS = 1.0
# A child that has lived so long did not end at once.
SETTLED_SECONDS = 60.0
RESTART_SECONDS = 0.5
RESTART_MAX_SECONDS = 30.0

Work = Callable[[int, ChildEnd, Stop], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a child may take, in seconds of the supervisor's own time.

    ``silence``: without a beat while it serves. ``stop``: after the signal, until it should
    have ended by itself; then ``last_silence`` without a beat, and ``last`` in any case.
    """

    silence: float
    stop: float
    last_silence: float = 5.0
    last: float = 60.0


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    pid: int
    line: ParentEnd
    born: float
    heard: float
    retires: bool = False
    killed: bool = False


@dataclass(slots=True, kw_only=True)
class Place:
    """One of the P processes: who serves there, and who finishes beside its successor."""

    number: int
    serving: Child | None = None
    retiring: Child | None = None
    short_lives: int = 0
    next_start: float = 0.0

    @property
    def children(self) -> list[Child]:
        return [child for child in (self.serving, self.retiring) if child is not None]


@dataclass(slots=True)
class OwnTime:
    """Seconds in which the supervisor itself was at work.

    A machine that slept, or a process group that was stopped, stops this clock too: nobody is
    taken for dead for a silence that we have slept through.
    """

    now: float = 0.0
    _seen: float = field(default_factory=time.monotonic)

    def tick(self) -> None:
        seen = time.monotonic()
        self.now += min(seen - self._seen, LONGEST_TICK_SECONDS)
        self._seen = seen


class Supervisor:
    """Fork ``count`` children that each run ``work``; replace the dead until told to stop.

    It forks before any connection or thread exists in this process. ``work`` gets the place's
    number, the line and the child's own stop, and gives an exit code. A child that is silent for
    too long is killed and replaced; one that retires finishes beside its successor. With
    ``bounded`` work a child that drained has done its part and is not replaced.
    """

    def __init__(
        self,
        count: int,
        work: Work,
        limits: Limits,
        *,
        bounded: bool = False,
        heartbeat: HeartbeatFile | None = None,
    ) -> None:
        self._work = work
        self._limits = limits
        self._bounded = bounded
        self._heartbeat = heartbeat
        self._places = [Place(number=number) for number in range(count)]
        self._time = OwnTime()
        self._stopping = False
        self._told_at = math.inf
        self._worst = DRAINED

    def run(self, stop: Stop) -> int:
        """Work until told to stop and all children have ended; give the exit code that counts."""
        stop.hand_to(self.stop, end_now=self._kill_all)
        with children_waited_for():
            return self._run()

    def _run(self) -> int:
        while self._is_needed():
            self._time.tick()
            if self._stopping:
                self._tell_all()
            for place in self._places:
                self._look_after(place)
            if os.getpid() == 1:
                self._reap_orphans()
            if self._heartbeat is not None and self._is_well():
                self._heartbeat.touch()
            time.sleep(TICK_SECONDS)
        return self._worst

    def stop(self) -> None:
        self._stopping = True

    def _is_well(self) -> bool:
        """Tell whether every place is served by somebody who was heard of lately."""
        return all(
            place.serving is not None
            and self._time.now - place.serving.heard <= self._limits.last_silence
            for place in self._places
            if place.next_start < math.inf
        )

    # -- the children

    def _children(self) -> list[Child]:
        return [child for place in self._places for child in place.children]

    def _is_needed(self) -> bool:
        if self._children():
            return True
        return not self._stopping and any(place.next_start < math.inf for place in self._places)

    def _look_after(self, place: Place) -> None:
        for child in place.children:
            status = _ended(child)
            if status is None:
                self._listen_to(child, place)
            else:
                self._bury(child, place, status)
        if place.serving is None and self._time.now >= place.next_start:
            self._start(place)

    def _listen_to(self, child: Child, place: Place) -> None:
        any_word, retires = child.line.heard()
        if any_word:
            child.heard = self._time.now
            child.retires |= retires
        # One beside its successor at most: the next one waits for the first to end.
        if child.retires and child is place.serving and place.retiring is None:
            place.serving, place.retiring = None, child
            pause = self._put_off(place, child.born)
            logger.info("worker process %d retires; its successor begins in %g s", child.pid, pause)
        complaint = self._complaint_of(child)
        if complaint is not None and not child.killed:
            logger.error("worker process %d %s and is killed", child.pid, complaint)
            child.killed = True
            _kill(child)

    def _complaint_of(self, child: Child) -> str | None:
        silence = self._time.now - child.heard
        late = self._time.now - self._told_at - self._limits.stop
        bound = self._limits.silence
        if late > 0:
            bound = min(bound, self._limits.last_silence)
        if silence > bound:
            return f"has been silent for {silence:.1f} s"
        return "does not end" if late > self._limits.last else None

    def _bury(self, child: Child, place: Place, status: int) -> None:
        child.line.close()
        code = os.waitstatus_to_exitcode(status)
        if self._stopping:
            self._worst = max(self._worst, code if code >= 0 else GAVE_UP)
        if child is place.retiring:
            place.retiring = None
            return
        place.serving = None
        if self._stopping or (self._bounded and code == DRAINED):
            place.next_start = math.inf
            return
        pause = self._put_off(place, child.born)
        logger.error(
            "worker process %d ended with %d and is replaced in %g s", child.pid, code, pause
        )

    def _put_off(self, place: Place, born: float) -> float:
        """Give the pause before the next child begins: longer while they end at once."""
        ended_at_once = self._time.now - born < SETTLED_SECONDS
        place.short_lives = place.short_lives + 1 if ended_at_once else 1
        pause = min(RESTART_MAX_SECONDS, RESTART_SECONDS * 2.0 ** min(place.short_lives - 1, 10))
        place.next_start = self._time.now + pause
        return pause

    def _start(self, place: Place) -> None:
        try:
            # A signal handler that ran in the child between here and there would be our own.
            # What is sent to the child meanwhile waits for its own.
            with held_back():
                if not self._stopping:
                    place.serving = self._fork(place.number)
        except OSError as error:
            pause = self._put_off(place, self._time.now)
            logger.error(
                "a worker process cannot be started and is tried again in %g s: %s", pause, error
            )

    def _fork(self, number: int) -> Child:
        """Raises ``OSError`` where the system has no process or descriptor left."""
        ours, theirs = lifeline()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                others = [ours, *(child.line for child in self._children())]
                _run_child(self._work, number, theirs, others)
        now = self._time.now
        return Child(pid=pid, line=ours, born=now, heard=now)

    # -- the end

    def _tell_all(self) -> None:
        if self._told_at == math.inf:
            self._told_at = self._time.now
            logger.info("stopping %s", counted(len(self._children()), "worker process"))
            for child in self._children():
                child.line.tell_to_stop()

    def _kill_all(self) -> None:
        for child in self._children():
            _kill(child)

    def _reap_orphans(self) -> None:
        """Bury whom the container's other processes leave to us, without taking a child's end."""
        ours = {child.pid for child in self._children()}
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, options)) and found.si_pid not in ours:
                os.waitpid(found.si_pid, 0)


def _ended(child: Child) -> int | None:
    """Give the status of a child that has ended."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    return status if pid else None


def _kill(child: Child) -> None:
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)


def _run_child(work: Work, number: int, theirs: socket.socket, others: list[ParentEnd]) -> None:
    """Run in the child and leave without the parent's clean-up."""
    code = CRASHED
    try:
        with stop_on_signal() as stop:
            for other in others:
                other.close()
            code = work(number, ChildEnd(theirs), stop)
    except BaseException:
        logger.exception("worker process crashed")
    finally:
        os._exit(code)
