"""What an operator asks of a concurrency limit: which it is, and who holds its places (3.12)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from .. import states
from ..dialects import dialect_for
from ..dialects.base import JOBS
from ..instants import SECOND
from ..models import Job, JobAttempt
from ._let_in import number_of
from .control import alias_of
from .limits import WAITING

SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A running job that holds a place: its row's number and job id, its worker, since when."""

    job: int
    job_id: str
    worker: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limit that a job counts under.

    ``number`` is how many may run, by the code of this process; None where it has no limit for
    the handler. ``running`` is how many do, ``holders`` the first ``SHOWN`` of these.
    """

    key: str
    number: int | None
    running: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How many jobs wait for a place under a limit, and since when the first of them is due.

    ``oldest_seconds`` is None where none waits. Those of paused queues count.
    """

    jobs: int
    oldest_seconds: float | None


def waiting_at_limits(alias: str) -> Waiting:
    """Count the jobs that wait for a place: the index that has these alone is read."""
    now = dialect_for(alias).now()
    sql = f"SELECT COUNT(*), {now} - MIN(n.run_at) FROM {JOBS} n WHERE {WAITING}"
    ((jobs, waited),) = dialect_for(alias).fetch(alias, sql)
    return Waiting(jobs=jobs, oldest_seconds=None if waited is None else max(0.0, waited / SECOND))


def limit_of(job: Job) -> Limit | None:
    """Say under which limit a job counts, and who holds its places; None without a key.

    Three indexed queries, whatever runs or waits.
    """
    if job.concurrency_key is None:
        return None
    alias = alias_of(job)
    of_key = Job.objects.using(alias).filter(
        status=states.RUNNING, handler=job.handler, concurrency_key=job.concurrency_key
    )
    first = of_key.order_by("handler", "concurrency_key", "id").only("job_id", "lease_token")
    tokens = {one.lease_token: one for one in first[:SHOWN]}
    attempts = JobAttempt.objects.using(alias).filter(token__in=[one for one in tokens if one])
    return Limit(
        key=job.concurrency_key,
        number=number_of(job.handler),
        running=of_key.count(),
        holders=tuple(
            Holder(
                job=tokens[one.token].pk,
                job_id=tokens[one.token].job_id,
                worker=one.worker,
                since=one.started_at,
            )
            for one in attempts.order_by("id")
        ),
    )
