"""A worker's memory stays as it is, however many jobs it has run."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from django.db import connection

from django_durable_jobs import JobSubmission
from django_durable_jobs.models import Job

from ..testapp import jobs
from .conftest import StartWorker
from .support import Process

COUNT = 100_000
PROCESSES = 2 if connection.vendor == "postgresql" else 1
MIB = 1024 * 1024
# From the middle of the second fifth to that of the last, each process runs 30,000 jobs or more.
TOLERANCE = 4 * MIB


def submissions(folder: Path) -> list[JobSubmission]:
    """Ten small jobs of different kinds: they do nothing, fail, or have an ``on_finish``."""
    failing = jobs.Work(effects=str(folder / "effects"), seconds=0, obedient=True, failures=1.0)
    return [
        *(JobSubmission.create(jobs.nothing) for _ in range(6)),
        *(JobSubmission.create(jobs.nothing_async) for _ in range(2)),
        JobSubmission.create(jobs.work, failing, max_attempts=1),
        JobSubmission.create(jobs.deposit_at_the_end, 1, scope="0"),
    ]


def multiply(templates: list[JobSubmission]) -> None:
    """Store as many jobs like these, of each kind the same number due in any stretch of time."""
    times = COUNT // len(templates) - 1
    originals = Job.objects.submit_many(templates)
    values = {field.column: field.column for field in Job._meta.concrete_fields}
    del values["id"]
    values["job_id"] = "job_id || '-' || n.i"
    values["run_at"] = f"run_at - ({times} - n.i) * 1000"
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {Job._meta.db_table} ({', '.join(values)})"
            f" WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {times})"
            f" SELECT {', '.join(values.values())} FROM n, {Job._meta.db_table}"
            f" WHERE id BETWEEN {originals[0].pk} AND {originals[-1].pk}"
        )
    assert Job.objects.filter(status="queued").count() == COUNT


def own_bytes(pid: int | str) -> int | None:
    """Give the memory of a process that no file stands behind; None where nothing tells it.

    Its proportional memory (PSS) would not do: the shares of what a parent and its child have in
    common step up and down by megabytes, in both at once, while none of them takes a page more.
    """
    with suppress(OSError):
        told = Path(f"/proc/{pid}/status").read_text()
        found = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", told, re.MULTILINE)
        return sum(map(int, found)) * 1024 if found else None
    return None


def sampled(worker: Process) -> dict[int, list[int]]:
    """Measure the processes of a worker twice a second, until all jobs have ended."""
    found: dict[int, list[int]] = {}
    while Job.objects.filter(status__in=["queued", "running"]).exists():
        for pid in [worker.pid, *worker.children()]:
            if (size := own_bytes(pid)) is not None:
                found.setdefault(pid, []).append(size)
        time.sleep(0.5)
    return found


@pytest.mark.skipif(
    own_bytes("self") is None,
    reason="this system does not tell what memory a process has (on Linux: /proc/PID/status)",
)
@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.django_db(transaction=True)
def test_a_hundred_thousand_jobs_leave_no_memory_behind(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    multiply(submissions(tmp_path))
    worker = start_worker(f"--processes={PROCESSES}", "--threads=4", "-v0")
    memory = sampled(worker)
    worker.send()
    assert worker.ends() == 0
    ends = Counter(Job.objects.values_list("handler", "status"))
    assert ends == {
        ("testapp.nothing", "succeeded"): COUNT * 6 // 10,
        ("testapp.nothing_async", "succeeded"): COUNT * 2 // 10,
        ("testapp.work", "failed"): COUNT // 10,
        ("testapp.deposit_at_the_end", "succeeded"): COUNT // 10,
    }
    # The same processes from the first sample to the last.
    assert len(memory) == 1 + PROCESSES
    for samples in memory.values():
        fifth = len(samples) // 5
        assert fifth >= 10
        early, late = samples[fifth : 2 * fifth], samples[-fifth:]
        grown = statistics.median(late) - statistics.median(early)
        assert grown < TOLERANCE, f"KiB: {[one // 1024 for one in samples[:: fifth // 5]]}"
