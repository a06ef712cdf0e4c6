"""SQLite in its default journal mode, a rollback journal, whatever mode the suite runs in.

There a commit waits for all who read, and who reads waits for a commit; in WAL mode neither
does. All that waits is bounded, and what is promised holds.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test import override_settings

from django_durable_jobs import LockTimeout
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.transitions import claims, leases, outcomes, recovery
from django_durable_jobs.worker.execution import context_for
from tests.racing import PATIENT, Signal, another_alias, held, racing
from tests.testapp.models import Business
from tests.transitions.live import claim, done, holders, queued

from ..testapp.jobs import Line, line
from .conftest import StartWorker
from .support import Background, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "sqlite", reason="a journal mode is SQLite's"),
]
SUBMISSIONS = 40
# Both workers serve the first, and one each of the others.
QUEUES = ("default", "first", "second")


@pytest.fixture
def default_mode(tmp_path: Path) -> Iterator[str]:
    """Give an alias of a database file with our tables, made as SQLite makes one."""
    file = tmp_path / "default.sqlite3"
    with connection.cursor() as cursor:
        cursor.execute("VACUUM INTO %s", [str(file)])
    with another_alias(NAME=str(file), OPTIONS={"timeout": 120}) as alias:
        with connections[alias].cursor() as cursor:
            cursor.execute("PRAGMA journal_mode")
            assert cursor.fetchone() == ("delete",)
        yield alias


def test_two_workers_beside_submitters_readers_and_cancels(
    default_mode: str,
    start_worker: StartWorker,
    durable_jobs: Callable[..., None],
    tmp_path: Path,
) -> None:
    # Whoever writes may stand still for a while: the others outlast it.
    durable_jobs(LOCK_TIMEOUT_SECONDS=60)
    jobs = Job.objects.using(default_mode)
    file = str(tmp_path / "lines")
    variables = {
        "TEST_DATABASE_NAME": str(connections[default_mode].settings_dict["NAME"]),
        "TEST_SQLITE_JOURNAL": "delete",
    }
    workers = []
    for name in QUEUES[1:]:
        arguments = ("--processes=0", f"--queues=default,{name}", f"--name={name}")
        workers.append(start_worker(*arguments, variables=variables))
        line.submit(Line(file=file, number=-1), queue=name, using=default_mode)
    until(lambda: jobs.filter(status="succeeded").count() == 2, "both to be at work")

    def submit(caller: int) -> None:
        for number in range(SUBMISSIONS):
            # A fourth of them are the same requests of both callers.
            name = number if number % 4 == 0 else (caller + 1) * 1000 + number
            payload, queue = Line(file=file, number=name), QUEUES[name % 3]
            line.submit(payload, job_id=f"job-{name}", queue=queue, using=default_mode)

    def cancel() -> Counter[str]:
        ids = itertools.islice(itertools.cycle(range(1000, 1000 + SUBMISSIONS)), 2 * SUBMISSIONS)
        found = [jobs.filter(job_id=f"job-{number}").first() for number in ids]
        return Counter(one.request_cancel() for one in found if one is not None)

    ended = False
    count = 0

    def read() -> None:
        nonlocal count
        while not ended:
            with transaction.atomic(using=default_mode):
                list(jobs.values_list("status", "attempts__status"))
            count += 1

    reader = Background(read)
    with racing(lambda: submit(0), lambda: submit(1), cancel, alias=default_mode) as racers:
        pass
    for racer in racers:
        racer.result()
    until(lambda: not jobs.filter(status__in=["queued", "running"]).exists(), "all to end")
    until(lambda: count > 1 or not reader.is_alive, "the reader to have read")
    ended = True
    reader.ends()
    for worker in workers:
        worker.send()
    assert [worker.ends() for worker in workers] == [0, 0]

    stored = dict(jobs.values_list("job_id", "status"))
    assert len(stored) == 2 + SUBMISSIONS // 4 + 2 * (SUBMISSIONS - SUBMISSIONS // 4)
    assert set(stored.values()) <= {"succeeded", "cancelled"}
    executions = Counter(Path(file).read_text().split())
    assert executions.pop("-1") == 2 and set(executions.values()) == {1}
    attempts = JobAttempt.objects.using(default_mode)
    assert attempts.count() == executions.total() + 2, "an attempt for each execution"
    by_worker = Counter(attempts.values_list("worker", flat=True))
    assert min(by_worker["first"], by_worker["second"]) > 1, "both have run some"


def read_all(alias: str) -> None:
    list(Job.objects.using(alias).all())


WRITES: dict[str, Callable[[str, claims.ClaimedJob], Any]] = {
    "submit": lambda alias, one: line.submit(Line(file="", number=1), using=alias),
    "claim": lambda alias, one: claim(alias=alias),
    "renew": lambda alias, one: leases.renew(alias, holders([one]), lease_seconds=60),
    "finish": lambda alias, one: outcomes.finish(alias, [done(one)]),
    "progress": lambda alias, one: outcomes.record_progress(alias, one.id, one.token, 0.5, ""),
    "cancel": lambda alias, one: Job.objects.using(alias).get(pk=one.id).request_cancel(),
    "recover": lambda alias, one: recovery.recover_expired(alias),
}


def running_and_queued(alias: str) -> claims.ClaimedJob:
    """Store three jobs that are due; give the second, claimed; the lease of the first is over."""
    queued(3, alias=alias)
    expired, one = claim(2, alias=alias)
    Job.objects.using(alias).filter(pk=expired.id).update(lease_expires_at=1)
    return one


def rows(alias: str) -> list[Any]:
    return [
        list(model.objects.using(alias).order_by("pk").values_list()) for model in (Job, JobAttempt)
    ]


@pytest.mark.parametrize("name", WRITES)
def test_a_commit_waits_for_a_reader_a_bounded_time(default_mode: str, name: str) -> None:
    one = running_and_queued(default_mode)
    before = rows(default_mode)
    work = lambda: WRITES[name](default_mode, one)  # noqa: E731
    with held(lambda: read_all(default_mode), alias=default_mode) as reader:
        with override_settings(DURABLE_JOBS={"LOCK_TIMEOUT_SECONDS": 0.1}):
            began = time.monotonic()
            with pytest.raises(LockTimeout):
                work()
            assert time.monotonic() - began < 60, "as we say, not as the connection does (120 s)"
            assert rows(default_mode) == before
        with override_settings(DURABLE_JOBS=PATIENT), racing(work, alias=default_mode) as [writer]:
            writer.wait_until_blocked()
            reader.commit()
        writer.result()
    assert rows(default_mode) != before


def test_a_transaction_that_has_read_is_refused_while_a_commit_waits_for_it(
    default_mode: str,
) -> None:
    """Each would wait for the other, so SQLite says at once that it is locked."""
    has_read, go = Signal(), Signal()

    def read_then_stage() -> None:
        with transaction.atomic(using=default_mode):
            read_all(default_mode)
            has_read.set()
            go.wait()
            line.stage(Line(file="", number=1), using=default_mode)

    def write() -> None:
        with transaction.atomic(using=default_mode):
            Business.objects.using(default_mode).create(name="writer")

    with racing(read_then_stage, alias=default_mode) as [reader]:
        has_read.wait()
        with racing(write, alias=default_mode) as [writer]:
            writer.wait_until_blocked()
            go.set()
            assert isinstance(reader.error(), OperationalError)
        writer.result()
    assert not Job.objects.using(default_mode).exists()


def test_what_a_claims_commit_has_waited_is_taken_from_the_timeout(default_mode: str) -> None:
    """Its lease began before: an attempt must end before its lease does (CONTRACT 4.5)."""
    queued(alias=default_mode, timeout=50)
    with (
        override_settings(DURABLE_JOBS=PATIENT),
        held(lambda: read_all(default_mode), alias=default_mode) as reader,
        racing(lambda: claim(alias=default_mode), alias=default_mode) as [claimer],
    ):
        claimer.wait_until_blocked()
        blocked_at = time.monotonic()
        time.sleep(0.2)
        reader.commit()
        waited = time.monotonic() - blocked_at
        [one] = claimer.result()
    assert context_for(default_mode, one).remaining() <= 50 - waited
