"""Many jobs and two workers: each job runs exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from django_durable_jobs import JobSubmission
from django_durable_jobs.models import Job, JobAttempt

from ..testapp.jobs import Line, line
from .conftest import StartWorker
from .support import until

pytestmark = pytest.mark.django_db(transaction=True)

JOBS = 5000


def attempts_of_each() -> Counter[str]:
    return Counter(JobAttempt.objects.values_list("worker", flat=True))


@pytest.mark.timeout(1100)
def test_two_workers_run_five_thousand_jobs_once_each(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    workers = []
    for name in ("first", "second"):
        workers.append(start_worker("--processes=0", f"--queues=default,{name}", f"--name={name}"))
        line.submit(Line(file=str(file), number=-1), queue=name)
    # From here on both are at work.
    until(lambda: Job.objects.filter(status="succeeded").count() == 2)
    count = 0
    # Once more, should one of them stand still for so long that the other takes all.
    while min(attempts_of_each().values()) == 1:
        numbers = range(count, count + JOBS)
        Job.objects.submit_many(
            JobSubmission.create(line, Line(file=str(file), number=number)) for number in numbers
        )
        count += JOBS
        unfinished = Job.objects.filter(status__in=["queued", "running"])
        until(lambda ours=unfinished: not ours.exists(), patience=500)
    for worker in workers:
        worker.send()
    assert [worker.ends() for worker in workers] == [0, 0]

    executions = Counter(file.read_text().split())
    assert executions.pop("-1") == 2
    assert len(executions) == count
    assert set(executions.values()) == {1}
    assert Job.objects.filter(status="succeeded", attempt_count=1).count() == count + 2
    assert JobAttempt.objects.filter(status="succeeded", number=1).count() == count + 2
    assert JobAttempt.objects.count() == count + 2
    assert set(attempts_of_each()) == {"first", "second"}
