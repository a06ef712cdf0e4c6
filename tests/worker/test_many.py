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


@pytest.mark.timeout(600)
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
    Job.objects.submit_many(
        JobSubmission.create(line, Line(file=str(file), number=number)) for number in range(JOBS)
    )
    until(lambda: not Job.objects.filter(status__in=["queued", "running"]).exists(), patience=500)
    for worker in workers:
        worker.send()
    assert [worker.ends() for worker in workers] == [0, 0]

    executions = Counter(file.read_text().split())
    assert executions.pop("-1") == 2
    assert len(executions) == JOBS
    assert set(executions.values()) == {1}
    assert Job.objects.filter(status="succeeded", attempt_count=1).count() == JOBS + 2
    assert JobAttempt.objects.filter(status="succeeded", number=1).count() == JOBS + 2
    assert JobAttempt.objects.count() == JOBS + 2
    by_worker = Counter(JobAttempt.objects.values_list("worker", flat=True))
    assert set(by_worker) == {"first", "second"}
    assert min(by_worker.values()) > 1
