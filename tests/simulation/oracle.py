"""Sections 1 to 3 of the contract in memory: what the tables must hold after every move.

Written from the contract, with no code of the package: jobs by number in the order they were
made, refusals by the name of the error that the caller gets.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

WAITING = ("scheduled", "queued", "blocked")
TERMINAL = ("succeeded", "failed", "cancelled", "interrupted")


class Refused(Exception):
    """The contract's error of that name; nothing has changed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Lane(NamedTuple):
    queue: str
    handler: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a caller asks for; equal requests of one identity are one job (1.3)."""

    job_id: str | None
    scope: str
    handler: str
    payload: int
    queue: str
    priority: int
    max_attempts: int
    dedupe_key: str | None
    run_at: datetime | None
    retry_on_interrupt: bool
    concurrency_key: str | None = None

    @property
    def identity(self) -> tuple[str, str | None]:
        return (self.scope, self.job_id)

    @property
    def key(self) -> tuple[str, str, str] | None:
        return None if self.dedupe_key is None else (self.scope, self.handler, self.dedupe_key)


@dataclass(frozen=True, kw_only=True)
class End:
    """How a handler ended, as its worker reports it."""

    status: str = "succeeded"
    outcome: str = "returned"
    final_status: str = "succeeded"
    result: Any = None
    delay: timedelta | None = None
    stopped_by_worker: bool = False
    category: str | None = None


@dataclass(kw_only=True)
class Attempt:
    number: int
    token: str
    worker: str
    started_at: datetime
    status: str = "running"
    outcome: str | None = None
    finished_at: datetime | None = None
    progress: float = 0.0
    cancel_requested_at: datetime | None = None
    error_category: str | None = None

    def close(self, status: str, outcome: str, now: datetime, category: str | None) -> None:
        self.status, self.outcome = status, outcome
        self.finished_at, self.error_category = now, category


@dataclass(kw_only=True)
class Job:
    number: int
    request: Request
    created_at: datetime
    run_at: datetime
    status: str
    max_attempts: int
    blocked_reason: str | None = None
    limit_waiting: bool = False
    attempt_count: int = 0
    granted_attempts: int = 0
    cancel_requested_at: datetime | None = None
    lease_token: str | None = None
    lease_expires_at: datetime | None = None
    finished_at: datetime | None = None
    progress: float = 0.0
    progress_message: str = ""
    checkpoint: Any = None
    result: Any = None
    error_category: str | None = None
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def lane(self) -> Lane:
        return Lane(self.request.queue, self.request.handler)

    @property
    def limit_key(self) -> tuple[str, str] | None:
        key = self.request.concurrency_key
        return None if key is None else (self.request.handler, key)

    @property
    def place(self) -> tuple[int, datetime, int]:
        """Where it stands in the order of claims (4.1)."""
        return (-self.request.priority, self.run_at, self.number)

    @property
    def executions_left(self) -> bool:
        return self.attempt_count < self.max_attempts + self.granted_attempts

    @property
    def cancelled(self) -> bool:
        return self.cancel_requested_at is not None

    @property
    def holds_key(self) -> bool:
        if self.request.dedupe_key is None:
            return False
        return self.status in ("scheduled", "queued", "running") or (
            self.status == "blocked" and self.blocked_reason != "corrupt_payload"
        )

    @property
    def open_attempt(self) -> Attempt | None:
        """The attempt that is the current token's."""
        for attempt in self.attempts:
            if attempt.status == "running" and attempt.token == self.lease_token:
                return attempt
        return None

    def owned_by(self, token: str, now: datetime) -> bool:
        return (
            self.status == "running"
            and self.lease_token == token
            and self.lease_expires_at is not None
            and self.lease_expires_at > now
        )

    def leave_running(self, status: str, now: datetime) -> None:
        self.status = status
        self.lease_token = self.lease_expires_at = None
        self.finished_at = now if status in TERMINAL else None


@dataclass(kw_only=True)
class Finished:
    """By token: the jobs' new statuses; whose end stood before; who owns nothing; no row."""

    written: dict[str, str] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)


class Oracle:
    """All jobs of one database, and the instant that decides."""

    def __init__(self, now: datetime, limits: Mapping[str, int]) -> None:
        self.now = now
        self.limits = limits
        self.jobs: list[Job] = []
        self.paused: set[str] = set()
        self.tokens: dict[str, int] = {}

    def copy_jobs(self) -> list[Job]:
        return copy.deepcopy(self.jobs)

    # -- submission (1.3 to 1.5)

    def submit(self, request: Request) -> tuple[int, bool]:
        """Give the job's number and whether it is new: identity first, the live key second."""
        for job in self.jobs:
            # Without an id of the caller's a new one is made, which nobody has.
            if request.job_id is not None and job.request.identity == request.identity:
                if replace(job.request, max_attempts=job.max_attempts) != request:
                    raise Refused("IdentityConflict")
                return job.number, False
        holder = self._holder(request.key)
        if holder is not None:
            return holder.number, False
        later = request.run_at is not None and request.run_at > self.now
        job = Job(
            number=len(self.jobs),
            request=request,
            created_at=self.now,
            run_at=self.now if request.run_at is None else request.run_at,
            status="scheduled" if later else "queued",
            max_attempts=request.max_attempts,
        )
        self.jobs.append(job)
        return job.number, True

    def submit_many(self, requests: Sequence[Request]) -> list[tuple[int, bool]]:
        """One conflict stores nothing; a repeat within the call is judged against its first."""
        first: dict[Any, Request] = {}
        for one in requests:
            if one.job_id is not None and first.setdefault(one.identity, one) != one:
                raise Refused("IdentityConflict")
        kept = self.copy_jobs()
        try:
            return [self.submit(one) for one in requests]
        except Refused:
            self.jobs = kept
            raise

    def _holder(self, key: tuple[str, str, str] | None, but: Job | None = None) -> Job | None:
        for job in self.jobs:
            if key is not None and job is not but and job.holds_key and job.request.key == key:
                return job
        return None

    # -- the worker's moves

    def lanes(self, status: str) -> set[Lane]:
        return {
            job.lane
            for job in self.jobs
            if job.status == status
            and not job.limit_waiting
            and not (status == "queued" and job.lane.queue in self.paused)
        }

    def claimable(self, lanes: Iterable[Lane], limit: int) -> list[int]:
        """Give what a claim takes, in its order (3.1, 4.1)."""
        return self._decided(lanes, limit)[0]

    def claim(self, lanes: Iterable[Lane], limit: int) -> list[int]:
        """Give what a claim takes; the jobs of the full keys that it meets begin to wait (3.12)."""
        taken, full = self._decided(lanes, limit)
        for job in self.jobs:
            if job.status == "queued" and job.limit_key in full and job.number not in taken:
                job.limit_waiting = True
        return taken

    def _decided(self, lanes: Iterable[Lane], limit: int) -> tuple[list[int], set[tuple[str, str]]]:
        wanted = self.lanes("queued") & set(lanes)
        found = [job for job in self.jobs if job.lane in wanted and self._can_start(job)]
        running = self._running()
        taken: list[int] = []
        full: set[tuple[str, str]] = set()
        for job in sorted(found, key=lambda job: job.place):
            if len(taken) == limit:
                break
            key = job.limit_key
            if key is not None and running[key] >= self.limits[key[0]]:
                full.add(key)
                continue
            taken.append(job.number)
            if key is not None:
                running[key] += 1
        return taken, full

    def _can_start(self, job: Job) -> bool:
        return (
            job.status == "queued"
            and not job.limit_waiting
            and job.run_at <= self.now
            and not job.cancelled
            and job.executions_left
        )

    def _running(self) -> Counter[tuple[str, str]]:
        """Count the running jobs of each key, whoever holds them."""
        return Counter(
            job.limit_key for job in self.jobs if job.status == "running" and job.limit_key
        )

    def _let_in(self, freed: Iterable[Job]) -> None:
        """Who of their keys has a turn now; those just moved are not asked (3.12)."""
        by_key: dict[Any, list[Job]] = {}
        for job in freed:
            by_key.setdefault(job.limit_key, []).append(job)
        for key, moved in by_key.items():
            if key is not None:
                for one in self._in_turn(key, but=moved):
                    one.limit_waiting = False

    def _in_turn(self, key: tuple[str, str], but: Sequence[Job] = ()) -> list[Job]:
        """Give who waits among the first for whom there are places, in the order of claims."""
        of_key = [one for one in self.jobs if one.limit_key == key]
        come = [one for one in of_key if self._can_start(one) and one not in but]
        waiting = [one for one in of_key if one.limit_waiting and one not in but]
        first = sorted(come + waiting, key=lambda one: one.place)[: self._free_places(key)]
        return [one for one in first if one.limit_waiting]

    def _free_places(self, key: tuple[str, str]) -> int:
        return max(0, self.limits[key[0]] - self._running()[key])

    def let_in_free(self) -> None:
        """The pass: those in turn; where these cannot come, or not to us, the next of ours."""
        for key in {job.limit_key for job in self.jobs if job.limit_waiting}:
            assert key is not None
            others = [one for one in self.jobs if one.lane.queue in self.paused]
            while True:
                let_in = self._in_turn(key) or self._in_turn(key, but=others)
                if not let_in:
                    break
                for one in let_in:
                    one.limit_waiting = False

    def claimed(self, number: int, token: str, worker: str, lease: timedelta) -> None:
        job = self.jobs[number]
        self.tokens[token] = number
        job.attempt_count += 1
        job.status = "running"
        job.lease_token, job.lease_expires_at = token, self.now + lease
        job.progress, job.progress_message = 0.0, ""
        job.attempts.append(
            Attempt(number=job.attempt_count, token=token, worker=worker, started_at=self.now)
        )

    def _owned(self, token: str) -> Job | None:
        job = self.jobs[self.tokens[token]]
        return job if job.owned_by(token, self.now) else None

    def renew(self, tokens: Iterable[str], lease: timedelta) -> set[str]:
        renewed = set()
        for token in tokens:
            job = self._owned(token)
            if job is not None and job.open_attempt is not None:
                job.lease_expires_at = self.now + lease
                renewed.add(token)
        return renewed

    def _whole(self, token: str) -> tuple[Job, Attempt]:
        job = self._owned(token)
        if job is None or job.open_attempt is None:
            raise Refused("LeaseLost")
        return job, job.open_attempt

    def progress(self, token: str, fraction: float, message: str) -> None:
        job, attempt = self._whole(token)
        if job.cancelled:
            raise Refused("JobCancelled")
        if fraction < job.progress:
            raise Refused("InvalidTransition")
        job.progress = attempt.progress = fraction
        job.progress_message = message

    def checkpoint(self, token: str, value: Any) -> None:
        job, _ = self._whole(token)
        job.checkpoint = value

    def fence(self, token: str, *, inside: bool) -> None:
        """Prove ownership inside the handler's transaction; changes nothing."""
        if not inside:
            raise Refused("TransactionRequired")
        if any(one.token == token and one.status == "succeeded" for one in self._attempts(token)):
            raise Refused("InvalidTransition")
        job, _ = self._whole(token)
        if job.cancelled:
            raise Refused("JobCancelled")

    def complete(self, token: str, result: Any, *, inside: bool) -> None:
        self.fence(token, inside=inside)
        job, attempt = self._whole(token)
        self._end(job, attempt, End(result=result))
        self._let_in([job])

    def _attempts(self, token: str) -> list[Attempt]:
        return self.jobs[self.tokens[token]].attempts

    def give_back(self, tokens: Iterable[str]) -> dict[int, str]:
        return self._undo_claims((token, None) for token in tokens)

    def block_claimed(self, tokens: Iterable[str], reason: str) -> dict[int, str]:
        return self._undo_claims((token, reason) for token in tokens)

    def _undo_claims(self, claims: Iterable[tuple[str, str | None]]) -> dict[int, str]:
        """Nothing ran: the attempt goes, the count is restored."""
        changed = {}
        for token, reason in claims:
            try:
                job, attempt = self._whole(token)
            except Refused:
                continue
            job.attempts.remove(attempt)
            job.attempt_count -= 1
            status = "queued" if reason is None else "blocked"
            job.leave_running("cancelled" if job.cancelled else status, self.now)
            job.blocked_reason = reason if job.status == "blocked" else None
            changed[job.number] = job.status
        self._let_in(self.jobs[number] for number in changed)
        return changed

    def finish(self, ends: Iterable[tuple[str, End]]) -> Finished:
        """Write each end that its token may write, each for itself."""
        finished = Finished()
        for token, end in ends:
            job = self._owned(token)
            if job is None:
                (finished.again if self.is_ended(token) else finished.lost).add(token)
            elif job.open_attempt is None:
                finished.damaged.add(token)
            else:
                self._end(job, job.open_attempt, end)
                finished.written[token] = job.status
        self._let_in(self.jobs[self.tokens[token]] for token in finished.written)
        return finished

    def is_ended(self, token: str) -> bool:
        """Tell whether its own holder has ended an attempt."""
        return any(
            one.token == token and one.outcome not in (None, "lost")
            for one in self._attempts(token)
        )

    def _end(self, job: Job, attempt: Attempt, end: End) -> None:
        cancelled = job.cancelled
        attempt.close("cancelled" if cancelled else end.status, end.outcome, self.now, end.category)
        attempt.cancel_requested_at = job.cancel_requested_at
        if cancelled:
            job.leave_running("cancelled", self.now)
            job.result = job.error_category = None
            return
        job.result, job.error_category = end.result, end.category
        if end.stopped_by_worker and job.request.retry_on_interrupt:
            job.leave_running("queued", self.now)
            job.run_at = self.now
            job.granted_attempts += 1
        elif end.delay is not None and job.executions_left:
            job.leave_running("scheduled", self.now)
            job.run_at = self.now + end.delay
        else:
            job.leave_running(end.final_status, self.now)
        if end.final_status == "succeeded":
            job.progress = attempt.progress = 1.0

    # -- the passes

    def promote(self) -> int:
        due = [job for job in self.jobs if job.status == "scheduled" and job.run_at <= self.now]
        for job in due:
            job.status = "queued"
        return len(due)

    def exhausted(self) -> list[Job]:
        return [job for job in self.jobs if job.status == "queued" and not job.executions_left]

    def exhaust(self) -> int:
        found = self.exhausted()
        for job in found:
            job.status, job.finished_at, job.error_category = "failed", self.now, "exhausted"
            job.limit_waiting = False
        self._let_in(found)
        return len(found)

    def expired(self) -> list[Job]:
        return [
            job
            for job in self.jobs
            if job.status == "running"
            and job.lease_token is not None
            and job.lease_expires_at is not None
            and job.lease_expires_at <= self.now
        ]

    def recover_expired(self) -> int:
        found = [job for job in self.expired() if job.open_attempt is not None]
        for job in found:
            self._lose(job, [job.open_attempt], job.request.retry_on_interrupt)
        self._let_in(found)
        return len(found)

    def _lose(self, job: Job, attempts: Iterable[Attempt | None], requeue: bool) -> None:
        for attempt in attempts:
            assert attempt is not None
            attempt.close("interrupted", "lost", self.now, "lost")
            attempt.cancel_requested_at = job.cancel_requested_at
        if job.cancelled:
            status = "cancelled"
        else:
            status = "queued" if requeue and job.executions_left else "interrupted"
        job.leave_running(status, self.now)
        job.error_category = None if status == "cancelled" else "lost"
        if status == "queued":
            job.run_at = self.now

    def block(self, lane: Lane, reason: str, patience: timedelta) -> int:
        due = self.now - patience
        found = [
            job
            for job in self.jobs
            if job.lane == lane
            and job.status == "queued"
            and not job.limit_waiting
            and job.run_at <= due
        ]
        for job in found:
            job.status, job.blocked_reason = "blocked", reason
        self._let_in(found)
        return len(found)

    def release_lane(self, lane: Lane) -> int:
        found = [
            job
            for job in self.jobs
            if job.lane == lane
            and job.status == "blocked"
            and job.blocked_reason != "corrupt_payload"
        ]
        for job in found:
            self._release(job)
        return len(found)

    def _release(self, job: Job) -> str:
        job.status = "queued" if job.run_at <= self.now else "scheduled"
        job.blocked_reason = None
        return job.status

    # -- the operator's moves

    def cancel(self, number: int) -> str:
        job = self.jobs[number]
        if job.status in TERMINAL:
            return "unchanged"
        if job.cancel_requested_at is None:
            job.cancel_requested_at = self.now
        if job.status == "running":
            return "requested"
        had_turn = job.status == "queued" and not job.limit_waiting
        job.status, job.blocked_reason, job.finished_at = "cancelled", None, self.now
        job.limit_waiting = False
        if had_turn:
            self._let_in([job])
        return "cancelled"

    def retry(self, number: int, extra: int) -> str:
        job = self.jobs[number]
        if job.status not in ("failed", "cancelled", "interrupted"):
            raise Refused("InvalidTransition")
        if job.attempt_count >= job.max_attempts + job.granted_attempts + extra:
            raise Refused("AttemptsExhausted")
        if self._holder(job.request.key, but=job) is not None:
            raise Refused("InvalidTransition")
        job.status, job.run_at, job.finished_at = "queued", self.now, None
        job.granted_attempts += extra
        job.progress, job.progress_message = 0.0, ""
        job.result = job.error_category = job.cancel_requested_at = None
        return job.status

    def release(self, number: int) -> str:
        job = self.jobs[number]
        if job.status != "blocked" or self._holder(job.request.key, but=job) is not None:
            raise Refused("InvalidTransition")
        return self._release(job)

    def recover(self, number: int, token: str | None, requeue: bool | None) -> str:
        job = self.jobs[number]
        if job.status != "running" or token != job.lease_token:
            raise Refused("InvalidTransition")
        if job.lease_token is None or job.lease_expires_at is None:
            ended = [one for one in job.attempts if one.status == "running"]
        elif job.open_attempt is None:
            raise Refused("InvalidTransition")
        else:
            ended = [job.open_attempt]
        self._lose(job, ended, job.request.retry_on_interrupt if requeue is None else requeue)
        self._let_in([job])
        return job.status

    # -- what is read

    def ownership(self, number: int) -> str:
        job = self.jobs[number]
        if job.status in TERMINAL:
            return "terminal"
        if job.status != "running":
            return "unclaimed"
        if job.lease_token is None or job.lease_expires_at is None:
            return "unknown"
        return "current" if job.lease_expires_at > self.now else "expired"

    def execution_status(self, token: str) -> str:
        job = self.jobs[self.tokens[token]]
        if job.status != "running" or job.lease_token != token or job.open_attempt is None:
            return "ended"
        return "cancel_requested" if job.cancelled else "running"
