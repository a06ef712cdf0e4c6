"""Exactly once, in the database: deposits by workers that are killed again and again (3.8)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from django.db import connection

from django_durable_jobs import JobSubmission
from django_durable_jobs.models import Job, JobAttempt

from ..testapp import jobs
from ..testapp.models import Business
from ..transitions.live import check_rows
from .conftest import StartWorker
from .support import Process, until

BY_COMPLETE, BY_ON_FINISH, ACCOUNTS = 2_000, 200, 4
KILLS = 3
# So many jobs end between two kills, so that all comes to an end however slow its start is.
PROGRESS = 20
KILLED = {"LEASE_SECONDS": 1.5, "TIMEOUT_SECONDS": 1.2, "POLL_SECONDS": 0.05}
if os.environ.get("TEST_SQLITE_JOURNAL") == "delete":
    # Each commit is slow there, and a writer may wait for others longer than a second. So few
    # jobs may be done after one kill, which may have hit a process that held none yet.
    BY_COMPLETE, BY_ON_FINISH, KILLS = 300, 30, 1
    KILLED |= {"LEASE_SECONDS": 6, "TIMEOUT_SECONDS": 5}
COUNT = BY_COMPLETE + BY_ON_FINISH
SECONDS = 300
TOTALS = (
    "SELECT (SELECT sum(value) FROM testapp_business),"
    " (SELECT coalesce(sum(CAST(result AS bigint)), 0) FROM django_durable_jobs_job"
    " WHERE status = 'succeeded')"
)


def deposits(accounts: list[int], start: int) -> Iterator[JobSubmission]:
    """Those that ``on_finish`` makes among the others; no two of one amount."""
    for number in range(start, start + COUNT):
        by_complete = number % (1 + BY_COMPLETE // BY_ON_FINISH)
        handler = jobs.deposit if by_complete else jobs.deposit_at_the_end
        yield JobSubmission.create(handler, number, scope=str(accounts[number % ACCOUNTS]))


def are_met(kills: int) -> bool:
    """Tell whether there were enough, and a job was running in one of those killed."""
    lost = JobAttempt.objects.filter(outcome="lost").exists()
    return kills >= KILLS and (lost or KILLS == 1)


def kill_one(supervisor: Process) -> bool:
    """Kill a worker, its siblings go on; False if it was gone before."""
    children = supervisor.children()
    if children:
        os.kill(random.choice(children), signal.SIGKILL)
    return bool(children)


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(SECONDS + 300)
def test_each_deposit_is_made_once_whoever_is_killed(
    start_worker: StartWorker, durable_jobs: Callable[..., None]
) -> None:
    durable_jobs(**KILLED)
    accounts = [Business.objects.create(name=f"account {n}").pk for n in range(ACCOUNTS)]
    supervisor = start_worker(
        *("--processes", "3", "--threads", "4"),
        durable_jobs=KILLED,
        variables={"TEST_CONN_MAX_AGE": "none"},
    )
    until(supervisor.children)
    submitted = killed = done_then = 0
    end = time.monotonic() + SECONDS
    while True:
        if not Job.objects.exclude(status="succeeded").exists():
            # More, should a machine that stands still have left too few to kill.
            if submitted and are_met(killed):
                break
            Job.objects.submit_many(deposits(accounts, submitted + 1))
            submitted += COUNT
        assert time.monotonic() < end, "they never come to an end"
        with connection.cursor() as cursor:
            cursor.execute(TOTALS)
            balance, succeeded = cursor.fetchone()
        # In one snapshot, at any time: what the jobs say is what is there.
        assert balance == succeeded
        time.sleep(1)
        done = Job.objects.filter(status="succeeded").count()
        if done >= done_then + PROGRESS and kill_one(supervisor):
            killed, done_then = killed + 1, done
    for account in Business.objects.all():
        amounts = Job.objects.filter(scope=str(account.pk)).values_list("result", flat=True)
        assert account.value == sum(amounts), account
    deposited = sum(Business.objects.values_list("value", flat=True))
    assert deposited == sum(range(submitted + 1))
    assert JobAttempt.objects.filter(status="succeeded").count() == submitted
    check_rows()
