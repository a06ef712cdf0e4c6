"""Databases that are away, read-only, locked, or swallowed by the network (CONTRACT 4.8)."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections

from django_durable_jobs import JobContext, job
from django_durable_jobs.exceptions import LeaseLost
from django_durable_jobs.handlers import Registry
from django_durable_jobs.models import Job
from django_durable_jobs.worker import stalls

from .._proxy import Proxy
from ..testapp import jobs
from .conftest import StartWorker
from .support import PATIENCE, QUICK, Gate, Serving, attempts, change, fresh, until

pytestmark = pytest.mark.django_db(transaction=True)

postgres = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="a file has no network in between"
)


class Held:
    """A handler that waits for the test, and says how it was stopped."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        self.stopped: list[str] = []

        @job("outages.held", timeout=50, max_attempts=2)
        def held(ctx: JobContext) -> int:
            self.begun.release()
            while not self.go.wait(0.01):
                try:
                    ctx.check()
                except LeaseLost as error:
                    self.stopped.append(type(error).__name__)
                    raise
            return ctx.attempt

        self.handler = held
        self.job = held.submit()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """New connections of this process go through it; the test's own is there already."""
    connection.ensure_connection()
    settings = connections.settings["default"]
    one = Proxy(int(settings["PORT"]))
    monkeypatch.setitem(settings, "HOST", "127.0.0.1")
    monkeypatch.setitem(settings, "PORT", str(one.port))
    monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], "connect_timeout": 2})
    yield one
    one.close()


@contextmanager
def impatient(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let the workers of this process cut connections soon, until those that count are lost.

    Not longer: they would cut those that are only slow, too. (One that was just being opened is
    given up by its own time limit.)
    """
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(stalls, "STALLED_SECONDS", 0.5)
        yield
        for who in ("the claim loop", "chores"):
            until(lambda who=who: f"{who} waits for the database" in caplog.text, who)


def is_renewed(one: Job) -> None:
    expiry = fresh(one).lease_expires_at
    until(lambda: fresh(one).lease_expires_at > expiry, "a renewal")


@postgres
def test_connections_that_the_network_swallows_are_cut_before_a_lease_is_over(
    renewed_often: None,
    handlers: Registry,
    durable_jobs: Callable[..., None],
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    durable_jobs(POLL_SECONDS=0.05, LEASE_SECONDS=60, LOCK_TIMEOUT_SECONDS=0.5)
    held = Held()
    serving = Serving(threads=2)
    assert held.begun.acquire(timeout=PATIENCE)
    until(lambda: proxy.connections > 3, "the loops")
    is_renewed(held.job)
    with impatient(caplog):
        proxy.freeze()
        is_renewed(held.job)  # on a new connection
        held.go.set()
        until(lambda: fresh(held.job).status == "succeeded")
    after = held.handler.submit()
    until(lambda: fresh(after).status == "succeeded", "a claim on a new connection")
    assert serving.stop() == 0
    assert "the database does not answer; the connection is cut" in caplog.text
    assert [len(attempts(one)) for one in (held.job, after)] == [1, 1]
    assert held.stopped == []


@postgres
def test_a_handler_is_told_when_no_renewal_gets_through(
    renewed_often: None,
    handlers: Registry,
    durable_jobs: Callable[..., None],
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    durable_jobs(POLL_SECONDS=0.05, LEASE_SECONDS=60, LOCK_TIMEOUT_SECONDS=0.5)
    held = Held()
    serving = Serving(threads=1)
    assert held.begun.acquire(timeout=PATIENCE)
    with impatient(caplog):
        proxy.freeze(newcomers=True)
        assert held.stopped == []
        # By its own clock: there is nobody whom it could ask.
        durable_jobs(LEASE_SECONDS=1.5)
        until(lambda: held.stopped, "the handler to be told")
        durable_jobs(LEASE_SECONDS=60)
    assert fresh(held.job).status == "running"
    change(held.job, lease_expires_at=1)
    proxy.thaw()
    assert held.begun.acquire(timeout=PATIENCE), "the second attempt"
    held.go.set()
    until(lambda: fresh(held.job).status == "succeeded")
    assert serving.stop() == 0
    assert [one.outcome for one in attempts(held.job)] == ["lost", "returned"]
    assert fresh(held.job).result == 2


@postgres
def test_a_start_waits_for_the_database(start_worker: StartWorker) -> None:
    port = int(connection.settings_dict["PORT"])
    proxy = Proxy(port, opened=False)
    url = os.environ["DATABASE_URL"].replace(f":{port}/", f":{proxy.port}/")
    worker, other = (
        start_worker(f"--processes={number}", variables={"DATABASE_URL": url}) for number in (0, 1)
    )
    for one in (worker, other):
        until(lambda one=one: "the start waits for the database" in one.output(), "the wait")
    # A signal ends the wait as it ends all else.
    other.send()
    assert other.ends() == 0, other.output()
    assert "Worker " not in other.output()
    proxy.open()
    until(lambda: "Worker " in worker.output(), "the start")
    worker.send()
    assert worker.ends() == 0, worker.output()
    proxy.close()
    assert "Traceback" not in worker.output()


@postgres
def test_a_read_only_failover_is_waited_out(start_worker: StartWorker, gate: Gate) -> None:
    name = connection.settings_dict["NAME"]
    one = jobs.gated.submit(jobs.Gate(**gate.payload("one")))
    worker = start_worker("--processes=0", "--threads=2")
    gate.begun("one")

    def read_only(value: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = off")
            cursor.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = {value}')
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    read_only("on")
    try:
        gate.open("one")
        other = jobs.gated.submit(jobs.Gate(**gate.payload("other")))
        until(lambda: worker.output().count("waits for the database") > 2, "the refusals")
        assert fresh(one).status == "running"
        assert not gate.has_begun("other")
    finally:
        read_only("off")
    gate.open("other")
    until(lambda: [fresh(job).status for job in (one, other)] == ["succeeded"] * 2)
    worker.send()
    assert worker.ends() == 0, worker.output()
    assert [len(attempts(job)) for job in (one, other)] == [1, 1]
    # Backoff, not a flood: seconds of it by a handful of loops.
    assert worker.output().count("waits for the database") < 200
    assert "Traceback" not in worker.output()


sqlite = pytest.mark.skipif(connection.vendor != "sqlite", reason="a lock of the whole database")


@sqlite
def test_a_write_lock_held_by_another_process_is_waited_out(
    start_worker: StartWorker, gate: Gate
) -> None:
    one = jobs.gated.submit(jobs.Gate(**gate.payload("one")))
    other = jobs.gated.submit(jobs.Gate(**gate.payload("other")), priority=-1)
    settings: dict[str, Any] = {**QUICK, "LOCK_TIMEOUT_SECONDS": 1}
    worker = start_worker("--processes=0", "--threads=1", durable_jobs=settings)
    gate.begun("one")
    stranger = sqlite3.connect(
        connection.settings_dict["NAME"], isolation_level=None, timeout=PATIENCE
    )
    stranger.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    gate.open("one")
    gate.open("other")
    time.sleep(4)  # Several times what a wait for the lock may last.
    until(lambda: "LockTimeout" in worker.output(), "a wait that was over")
    assert not gate.has_begun("other")
    stranger.execute("ROLLBACK")
    seconds = time.monotonic() - began
    stranger.close()
    until(lambda: [fresh(job).status for job in (one, other)] == ["succeeded"] * 2)
    worker.send()
    assert worker.ends() == 0, worker.output()
    assert [len(attempts(job)) for job in (one, other)] == [1, 1]
    assert worker.output().count("waits for the database") < 15 * seconds
    assert "Traceback" not in worker.output()


@sqlite
@pytest.mark.long
def test_ten_seconds_of_a_write_lock_cost_no_result_and_no_execution(
    start_worker: StartWorker, gate: Gate, durable_jobs: Callable[..., None]
) -> None:
    """Two processes full of jobs: some end meanwhile, one runs on and looks, others wait."""
    settings = {**QUICK, "LEASE_SECONDS": 36, "TIMEOUT_SECONDS": 35, "LOCK_TIMEOUT_SECONDS": 1}
    durable_jobs(**settings)
    running = [f"running-{number}" for number in range(5)]
    waiting = [f"waiting-{number}" for number in range(6)]
    every = [jobs.gated.submit(jobs.Gate(**gate.payload(name))) for name in running]
    every.append(jobs.obedient.submit(jobs.Gate(**gate.payload("looking"))))
    worker = start_worker("--processes=2", "--threads=3", durable_jobs=settings)
    for name in (*running, "looking"):
        gate.begun(name)
    every += [jobs.gated.submit(jobs.Gate(**gate.payload(name))) for name in waiting]
    stranger = sqlite3.connect(
        connection.settings_dict["NAME"], isolation_level=None, timeout=PATIENCE
    )
    began = time.monotonic()
    stranger.execute("BEGIN IMMEDIATE")
    for name in (*running, *waiting):
        gate.open(name)
    time.sleep(10)
    refused = "renewal waits for the database: LockTimeout"
    until(lambda: refused in worker.output(), "a refused renewal")
    assert not any(gate.has_begun(name) for name in waiting)
    stranger.execute("ROLLBACK")
    stranger.close()
    gate.open("looking")
    until(lambda: {fresh(job).status for job in every} == {"succeeded"})
    worker.send()
    assert worker.ends() == 0, worker.output()
    assert {tuple(one.outcome for one in attempts(job)) for job in every} == {("returned",)}
    told = worker.output()
    # One line for each wait of each loop, and each of these takes a second.
    assert told.count("waits for the database") < 2 * 8 * (time.monotonic() - began)
    assert "Traceback" not in told
