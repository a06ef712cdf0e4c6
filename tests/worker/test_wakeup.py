"""A worker hears of new work before its next poll (CONTRACT 4.4)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.db.backends.signals import connection_created
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import JobSubmission, announcements
from django_durable_jobs.dialects import Listener, _listening, dialect_for
from django_durable_jobs.models import Job
from django_durable_jobs.worker.loop import Worker
from django_durable_jobs.worker.options import build_options
from django_durable_jobs.worker.passes import Serving
from django_durable_jobs.worker.wakeup import WakeUp
from tests.testapp.jobs import Gate as Gated
from tests.testapp.jobs import Line, gated, line

from .conftest import StartWorker
from .support import QUICK, Background, Gate, fresh, until

pytestmark = pytest.mark.django_db(transaction=True)
on_postgresql = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="on SQLite a worker looks itself, nobody announces"
)

POLL = 55
PATIENCE = 40.0  # below the poll


@pytest.fixture(autouse=True)
def nothing_announced() -> Iterator[None]:
    announcements._announced.clear()
    yield
    announcements._announced.clear()


def staged(payload: Line) -> Job:
    with transaction.atomic():
        return line.stage(payload)


def retried(payload: Line) -> Job:
    job = line.submit(payload, run_at=timedelta(days=1))
    assert job.request_cancel() == "cancelled"
    return job.retry()


def released(payload: Line) -> Job:
    job = line.submit(payload, run_at=timedelta(days=1))
    # Not one of those that a worker releases by itself.
    Job.objects.filter(pk=job.pk).update(
        status="blocked", blocked_reason="corrupt_payload", run_at=job.created_at
    )
    job.release()
    return job


def recovered(payload: Line) -> Job:
    job = line.submit(payload, run_at=timedelta(days=1))
    # Running without a lease and a token, as an import leaves it: an operator's to recover.
    Job.objects.filter(pk=job.pk).update(status="running", attempt_count=1, run_at=job.created_at)
    assert job.recover(None, requeue=True) == "queued"
    return job


WAYS: list[Callable[[Line], Job]] = [line.submit, staged, retried, released, recovered]


def test_jobs_begin_long_before_the_next_poll(start_worker: StartWorker, tmp_path: Path) -> None:
    payload = Line(str(tmp_path / "lines"), 1)
    first = line.submit(payload)
    start_worker(durable_jobs={**QUICK, "POLL_SECONDS": POLL})
    until(lambda: fresh(first).is_terminal, "the worker's first poll")
    time.sleep(0.3)  # it rests now
    for way in WAYS:
        job = way(payload)
        until(lambda: fresh(job).is_terminal, way.__name__, PATIENCE)  # noqa: B023


def test_what_was_not_announced_again_does_not_wait_either(
    start_worker: StartWorker, gate: Gate, durable_jobs: Callable[..., None]
) -> None:
    """Of two jobs within ``QUIET_SECONDS`` only the first is announced; it still runs here."""
    rounds = 30
    # The gates stay shut through all rounds.
    lasting = {**QUICK, "LEASE_SECONDS": 300, "TIMEOUT_SECONDS": 250, "POLL_SECONDS": POLL}
    durable_jobs(**lasting)
    payload = Line(str(gate.folder / "lines"), 1)
    start_worker("--processes=0", f"--threads={rounds + 1}", durable_jobs=lasting)
    for number in range(rounds):
        gated.submit(Gated(**gate.payload(f"{number}")))
        time.sleep(number / rounds * announcements.QUIET_SECONDS)
        job = line.submit(payload)
        until(lambda: fresh(job).is_terminal, f"round {number}", PATIENCE)  # noqa: B023
    for number in range(rounds):
        gate.open(f"{number}")


def test_an_idle_worker_asks_one_question_in_a_poll_interval(
    durable_jobs: Callable[..., None], tmp_path: Path
) -> None:
    """What it asks besides, however short the interval: leases, and that it lives."""
    durable_jobs(POLL_SECONDS=0.1)
    asked: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        asked.append(sql)
        return execute(sql, params, many, context)

    def noting(*, connection: Any, **kwargs: Any) -> None:
        connection.execute_wrappers.append(note)

    first = line.submit(Line(str(tmp_path / "lines"), 1))
    worker = Worker(build_options(processes=0, threads=2))
    connection_created.connect(noting)
    running = Background(worker.run)
    try:
        until(lambda: fresh(first).is_terminal)
        time.sleep(0.3)
        began = time.monotonic()
        asked.clear()
        until(lambda: sum("WITH RECURSIVE" in sql for sql in asked) >= 8, "polls")
        noted = asked.copy()
        seconds = time.monotonic() - began
        polls = [sql for sql in noted if "WITH RECURSIVE" in sql]
        others = [sql for sql in noted if sql not in polls and "LISTEN" not in sql]
    finally:
        worker.stop()
        assert running.ends() == 0
        connection_created.disconnect(noting)
    # The intervals vary by a tenth or so; the first one had begun before.
    assert len(polls) <= 1.2 * seconds / 0.1 + 2, polls
    assert len(others) <= 2 + seconds, others


class Ear:
    """A listener in a thread of its own: what it heard, in order."""

    def __init__(self) -> None:
        self.heard: list[frozenset[str] | None] = []
        self.errors: list[Exception] = []
        self.listener: Listener | None = dialect_for("default").listener("default")
        self._stopping = False
        self._thread = Background(self._listen)
        until(lambda: self.heard == [None], "the first answer, that anything may have happened")
        self.heard.clear()

    def _listen(self) -> None:
        assert self.listener is not None
        while not self._stopping:
            try:
                if (heard := self.listener.wait(0.1)) != frozenset():
                    self.heard.append(heard)
            except DatabaseError as error:
                self.errors.append(error)
                connections["default"].close()

    def stop(self) -> list[frozenset[str] | None]:
        """Give what was heard; what was announced before has arrived."""
        self._stopping = True
        self._thread.ends()
        return self.heard

    def hears(self, queue: str) -> None:
        until(lambda: None in self.heard or any(queue in one or () for one in self.heard), queue)


@pytest.fixture
def ear() -> Iterator[Ear]:
    listening = Ear()
    yield listening
    listening.stop()


PAYLOAD = Line("nowhere", 1)


def test_each_door_is_heard_after_the_commit(ear: Ear) -> None:
    with transaction.atomic():
        line.stage(PAYLOAD, queue="staged")
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_notify(%s, %s)", ["django_durable_jobs", "rolled in"])
        time.sleep(0.2)
        assert ear.heard == []
    ear.hears("staged")
    ear.heard.clear()
    for number, door in enumerate([line.submit, line.enqueue]):
        door(PAYLOAD, queue=f"queue {number}")
        ear.hears(f"queue {number}")
    Job.objects.submit_many(
        [JobSubmission.create(line, PAYLOAD, queue=f"many {number}") for number in range(3)]
    )
    ear.hears("many 2")


@on_postgresql
def test_what_is_no_new_work_is_not_announced(ear: Ear) -> None:
    line.submit(PAYLOAD, run_at=timedelta(minutes=1), queue="later")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        line.stage(PAYLOAD, queue="undone")
        raise ZeroDivisionError
    again = JobSubmission.create(line, PAYLOAD, job_id="one", queue="once")
    Job.objects.submit(again)
    ear.hears("once")
    announcements._announced.clear()
    Job.objects.submit(again)
    line.submit(PAYLOAD, queue="end")
    ear.hears("end")
    assert ear.stop() == [{"once"}, {"end"}]


@on_postgresql
def test_it_can_be_turned_off(ear: Ear, durable_jobs: Callable[..., None]) -> None:
    durable_jobs(NOTIFY=False)
    line.submit(PAYLOAD, queue="silent")
    durable_jobs(NOTIFY=True)
    line.submit(PAYLOAD, queue="loud")
    ear.hears("loud")
    assert ear.stop() == [{"loud"}]


@on_postgresql
def test_what_was_just_announced_is_not_announced_again(
    ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "QUIET_SECONDS", 60)
    with CaptureQueriesContext(connection) as captured:
        for _ in range(20):
            line.submit(PAYLOAD)
            with transaction.atomic():
                line.stage(PAYLOAD)
                line.stage(PAYLOAD)
    assert sum("pg_notify" in one["sql"] for one in captured) == 1
    monkeypatch.setattr(announcements, "QUIET_SECONDS", 0)
    line.submit(PAYLOAD)
    ear.hears("default")


@on_postgresql
def test_a_lost_connection_after_the_commit_is_no_error_of_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lose() -> None:
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    with transaction.atomic():
        transaction.on_commit(lose)
        job = line.stage(PAYLOAD)
    connection.close()
    assert fresh(job).status == "queued"
    assert "new work was not announced" in caplog.text


@on_postgresql
def test_a_listener_whose_connection_is_lost_listens_again(ear: Ear) -> None:
    def of_listeners(what: str) -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT count({what}) FROM pg_stat_activity"
                " WHERE datname = current_database() AND query LIKE 'LISTEN%%'"
            )
            return int(cursor.fetchone()[0])

    # The backend of an earlier one may take its time to end.
    until(lambda: of_listeners("pid") == 1)
    assert of_listeners("pg_terminate_backend(pid)") == 1
    until(lambda: ear.errors, "the lost connection to be noticed")
    assert dialect_for("default").is_transient(ear.errors[0])
    until(lambda: None in ear.heard, "it to listen again, and to look at what it missed")
    ear.heard.clear()
    line.submit(PAYLOAD, queue="after")
    ear.hears("after")


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_worker_says_that_announcements_do_not_arrive(
    is_deaf: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = dialect_for("default").listener("default")
    assert listener is not None
    # In the one case it is waited out, in the other it is not.
    monkeypatch.setattr(_listening, "TEST_SECONDS", 0.3 if is_deaf else 60)
    if connection.vendor == "postgresql" and is_deaf:
        # What a pooler of transactions does to a subscription.
        listener.wait(0)
        with connection.cursor() as cursor:
            cursor.execute("UNLISTEN *")
    heard: list[int] = []
    with caplog.at_level(logging.WARNING):
        WakeUp(listener, Serving(), lambda: heard.append(1)).step()
    assert heard, "it looks, since it may have missed something meanwhile"
    deaf = connection.vendor == "postgresql" and is_deaf
    assert ("behind a pooler" in caplog.text) == deaf


@pytest.mark.parametrize(
    ("queues", "is_woken"),
    [(None, True), ({"a"}, True), ({"b", "a"}, True), ({"b"}, False), (set(), False)],
)
def test_only_queues_that_it_serves_wake_a_worker(queues: Any, is_woken: bool) -> None:
    class Told(Listener):
        def wait(self, seconds: float) -> Any:
            return queues

    heard: list[int] = []
    wake_up = WakeUp(Told("default"), Serving(queues=("a",)), lambda: heard.append(1))
    wake_up.step()
    heard.clear()
    wake_up.step()
    assert heard == [1] * is_woken


class InATestCase(TestCase):
    def test_nothing_is_left_to_be_called_after_the_commit(self) -> None:
        """A test that counts its own callbacks does not find ours."""
        with self.captureOnCommitCallbacks() as callbacks, transaction.atomic():
            line.stage(PAYLOAD)
        assert callbacks == []
