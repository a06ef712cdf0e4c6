"""The jobs that this worker holds: claimed, running or waiting for their finish to be written."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from ..transitions.claims import ClaimedJob
from .context import JobContext


@dataclass(slots=True, kw_only=True)
class Held:
    """One claim: its job, its context, whether its handler has begun, whether its end is known.

    ``overdue``: the hard limit has ended it without its handler; its lease is not renewed.
    ``told_seconds`` is what its ``on_finish`` has taken, in all tries that have ended.
    ``lost`` and ``damaged`` have been reported, each once. ``leased_at`` is when the last answer
    came that gave or renewed its lease (monotonic): that one has been over a lease later.
    """

    job: ClaimedJob
    ctx: JobContext
    begun: bool = False
    ended: bool = False
    overdue: bool = False
    lost: bool = False
    damaged: bool = False
    began_at: float = 0.0
    ended_at: float = 0.0
    told_seconds: float = 0.0
    leased_at: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long its handler took, by the monotonic clock."""
        return (self.ended_at or time.monotonic()) - self.began_at if self.begun else 0.0


class HeldJobs:
    """What renewal, the cancel watch and the shutdown look at; safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, held: list[Held]) -> None:
        with self._lock:
            self._jobs.update((one.job.token, one) for one in held)

    def remove(self, tokens: list[str]) -> dict[str, Held]:
        """Let go of jobs; give those that were held, by token."""
        with self._lock:
            return {token: self._jobs.pop(token) for token in tokens if token in self._jobs}

    def all(self) -> list[Held]:
        with self._lock:
            return list(self._jobs.values())

    def begin(self, held: Held) -> bool:
        """Mark that the handler begins now; False if the claim was taken back meanwhile."""
        with self._lock:
            if held.job.token not in self._jobs:
                return False
            held.begun = True
            held.began_at = time.monotonic()
            return True

    def end(self, held: Held) -> bool:
        """Mark that the attempt's end is known; False if it was known before."""
        with self._lock:
            if held.ended:
                return False
            held.ended = True
            held.ended_at = time.monotonic()
            return True

    def take_unbegun(self) -> list[Held]:
        """Take out the claims whose handlers have not begun."""
        with self._lock:
            waiting = [held for held in self._jobs.values() if not held.begun]
            for held in waiting:
                del self._jobs[held.job.token]
            return waiting
