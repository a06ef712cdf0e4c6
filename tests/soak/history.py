"""Decide from jobs, attempts and an independent record of effects whether a promise was broken."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from django_durable_jobs import states
from django_durable_jobs.models import Job, JobAttempt

BY_THE_WORKER = {states.RETURNED, states.RAISED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a handler did outside of every database; ``at`` by a clock of the whole machine."""

    what: str
    job: str
    token: str
    at: float


def violations(
    submitted: Collection[str],
    cancelled: Collection[str],
    jobs: Iterable[Job],
    attempts: Iterable[JobAttempt],
    effects: Iterable[Effect],
) -> list[str]:
    """Name every broken promise; ``attempts`` in the order of their numbers."""
    of_job: dict[int, list[JobAttempt]] = defaultdict(list)
    for attempt in attempts:
        of_job[attempt.job_id].append(attempt)
    of_token: dict[str, list[Effect]] = defaultdict(list)
    for effect in effects:
        of_token[effect.token].append(effect)
    found = {job.job_id: job for job in jobs}
    broken = [f"{name}: the job is lost" for name in set(submitted) - found.keys()]
    for name, job in found.items():
        mine = of_job[job.pk]
        for said in (
            *_of_job(job, mine, name in cancelled),
            *_of_attempts(mine, of_token),
            *_of_order(mine, of_token),
        ):
            broken.append(f"{name}: {said}")
    return broken


def _of_job(job: Job, attempts: Sequence[JobAttempt], was_cancelled: bool) -> Iterator[str]:
    if not job.is_terminal:
        yield f"it is {job.status} at the end"
    if job.status == states.CANCELLED and not was_cancelled:
        yield "it is cancelled, and nobody asked for it"
    if [one.number for one in attempts] != list(range(1, job.attempt_count + 1)):
        yield f"{job.attempt_count} attempts are counted, and the rows are others"
    if job.attempt_count > job.max_attempts + job.granted_attempts:
        yield "it was executed more often than allowed"
    stopped = sum(
        one.outcome == states.STOPPED and one.status == states.INTERRUPTED for one in attempts
    )
    if job.status != states.CANCELLED and job.granted_attempts != stopped:
        yield f"{stopped} attempts were stopped, and {job.granted_attempts} granted for it"
    won = [one.token for one in attempts if one.status == states.SUCCEEDED]
    if won != ([job.result] if job.status == states.SUCCEEDED else []):
        yield f"it is {job.status} with result {job.result}, and these attempts succeeded: {won}"


def _of_attempts(
    attempts: Sequence[JobAttempt], of_token: dict[str, list[Effect]]
) -> Iterator[str]:
    for one in attempts:
        if one.status == states.RUNNING:
            yield f"attempt {one.number} is still open"
        done = Counter(effect.what for effect in of_token[one.token])
        if max(done.values(), default=0) > 1:
            yield f"attempt {one.number} ran twice"
        if one.outcome in BY_THE_WORKER and done != {"begin": 1, "end": 1}:
            yield f"attempt {one.number} is said to have {one.outcome}, and did {dict(done)}"


def _of_order(attempts: Sequence[JobAttempt], of_token: dict[str, list[Effect]]) -> Iterator[str]:
    for earlier, later in pairwise(attempts):
        if earlier.finished_at is None or later.started_at < earlier.finished_at:
            yield f"attempts {earlier.number} and {later.number} overlap"
        # One that lost its lease may run on unheard; any other has ended before the next begins.
        ends = [one.at for one in of_token[earlier.token] if one.what == "end"]
        begins = [one.at for one in of_token[later.token] if one.what == "begin"]
        if earlier.outcome in BY_THE_WORKER and ends and begins and begins[0] < ends[0]:
            yield f"attempt {later.number} began while {earlier.number} ran under its lease"


def effects_in(file: Path) -> list[Effect]:
    """Read what the handlers of ``testapp.work`` have noted."""
    return [Effect(**json.loads(line)) for line in file.read_text().splitlines()]
