"""Schedules on a worker: its loop, its start, its options, its death (CONTRACT 4.7, 4.9, 5.3)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_durable_jobs import schedule, unschedule
from django_durable_jobs.exceptions import LockTimeout
from django_durable_jobs.models import Job, ScheduleCursor
from django_durable_jobs.schedules import cursors
from django_durable_jobs.schedules.declaration import registry
from django_durable_jobs.testing import FakeClock, run_schedules
from django_durable_jobs.worker.loop import Worker
from django_durable_jobs.worker.options import build_options
from django_durable_jobs.worker.scheduling import Scheduling
from tests._processes import ROOT
from tests.racing import PATIENT, observer
from tests.worker.support import PATIENCE, QUICK, Background, Process, environment_with, until

from .oracle import MINUTE, utc

pytestmark = pytest.mark.django_db(transaction=True)

Serve = Callable[..., Worker]


@pytest.fixture
def serve(settings: Any) -> Iterator[Serve]:
    """Start a worker in this process; all are stopped at the end."""
    settings.DURABLE_JOBS = {**PATIENT, "POLL_SECONDS": 0.05}
    started: list[tuple[Worker, Background]] = []

    def start(**options: Any) -> Worker:
        worker = Worker(build_options(processes=0, threads=1, **options))
        started.append((worker, Background(worker.run)))
        return worker

    yield start
    for worker, running in started:
        worker.stop()
        assert running.ends() == 0


def loop_of(worker: Worker) -> Any:
    (found,) = [one for one in worker._loops if one.name == "schedules"]
    return found


def owe(name: str, minutes: int) -> list[Any]:
    """Move a cursor back; give the minutes that its schedule owes then, if it fires at each."""
    row = ScheduleCursor.objects.get(name=name)
    last = row.last_minute - minutes * MINUTE
    owed = [last + n * MINUTE for n in range(1, minutes + 1)]
    ScheduleCursor.objects.filter(name=name).update(last_minute=last, next_minute=owed[0])
    return owed


def fired(name: str = "tick") -> list[Any]:
    jobs = Job.objects.filter(schedule=name).order_by("id")
    return list(jobs.values_list("scheduled_for", flat=True))


# The loop ---------------------------------------------------------------------------------------


def test_a_worker_activates_fires_and_runs(tick: Any, serve: Serve) -> None:
    schedule("tick", "* * * * *", tick)
    until(lambda: time.time() % 60 < 30, "a minute that does not end meanwhile")
    serve()
    until(ScheduleCursor.objects.exists, "the activation")
    assert fired() == []
    owed = owe("tick", 600)
    until(lambda: len(fired()) >= 600, "the rest in later passes, at once")
    assert fired()[:600] == owed
    until(lambda: Job.objects.filter(status="succeeded").exists(), "an occurrence to run")


def test_two_workers_fire_each_minute_once(tick: Any, serve: Serve) -> None:
    schedule("tick", "* * * * *", tick)
    run_schedules()
    owed = owe("tick", 300)
    for _ in range(2):
        serve(queues="nobody")
    until(lambda: len(fired()) >= 300)
    found = fired()
    assert found[:300] == owed
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("fault", ["ours", "theirs", "connection"])
def test_a_loop_that_raises_is_told_counted_and_goes_on(
    tick: Any, serve: Serve, monkeypatch: Any, caplog: Any, is_postgres: bool, fault: str
) -> None:
    """FAULTS 9 and 10, at the look for what is due."""
    plain = cursors.due
    faults = [fault]

    def due(alias: str) -> Any:
        if faults:
            faults.pop()
            if fault == "ours":
                raise RuntimeError("a fault of ours")
            if fault == "theirs":
                raise LockTimeout("locked")
            _drop_connection(is_postgres)
        return plain(alias)

    schedule("tick", "* * * * *", tick)
    run_schedules()
    owed = owe("tick", 2)
    monkeypatch.setattr(cursors, "due", due)
    worker = serve()
    until(lambda: len(fired()) >= 2)
    assert fired()[:2] == owed
    assert loop_of(worker).failures == 1
    assert ("a fault of ours" in caplog.text) == (fault == "ours")


def _drop_connection(is_postgres: bool) -> None:
    if not is_postgres:
        connection.connection.close()
        return
    with observer() as other:
        other.execute(
            "SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid]
        )


def test_the_wait_is_a_poll_or_the_rest_of_the_minute(tick: Any, settings: Any) -> None:
    settings.DURABLE_JOBS = {"POLL_SECONDS": 10}
    woken: list[bool] = []
    stopping: list[bool] = []
    schedule("tick", "* * * * *", tick)
    with FakeClock(utc("2026-03-01T12:00")) as clock:
        scheduling = Scheduling(
            "default", fired=lambda: woken.append(True), is_stopping=lambda: bool(stopping)
        )
        scheduling.step()
        assert scheduling.interval() == 10
        clock.advance(57)
        scheduling.step()
        assert scheduling.interval() == pytest.approx(3.005)
        assert not woken
        clock.advance(300 * 60)
        scheduling.step()
        assert (scheduling.interval(), woken) == (0, [True])
        stopping.append(True)
        scheduling.step()
        assert len(fired()) == 256
        stopping.clear()
        scheduling.step()
        assert len(fired()) == 300
        assert 0 < scheduling.interval() <= 10


# Options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["no_schedules", "drain", "once"])
def test_who_fires_no_schedules(tick: Any, option: str) -> None:
    schedule("tick", "* * * * *", tick)
    run_schedules()
    owe("tick", 3)
    before = list(ScheduleCursor.objects.values())
    options = {option: True} if option == "no_schedules" else {option: True, "threads": 1}
    worker = Worker(build_options(processes=0, **options))
    assert "schedules" not in {one.name for one in worker._loops}
    if option != "no_schedules":
        call_command("runjobs", f"--{option}", verbosity=0)
    assert list(ScheduleCursor.objects.values()) == before
    assert fired() == []


def test_without_a_schedule_there_is_no_loop() -> None:
    worker = Worker(build_options(processes=0))
    assert "schedules" not in {one.name for one in worker._loops}


@pytest.mark.parametrize("how", ["--once", "--drain"])
def test_another_cron_stops_the_start(tick: Any, how: str) -> None:
    schedule("tick", "* * * * *", tick)
    run_schedules()
    unschedule("tick")
    schedule("tick", "*/2 * * * *", tick)
    with pytest.raises(CommandError, match=r"manage\.py jobs adopt-schedule tick") as caught:
        call_command("runjobs", how, verbosity=0)
    assert caught.value.returncode == 2
    call_command("runjobs", how, "--no-schedules", verbosity=0)
    call_command("jobs", "adopt-schedule", "tick", verbosity=0)
    call_command("runjobs", how, verbosity=0)


# Processes --------------------------------------------------------------------------------------

TICK = {"name": "tick", "cron": "* * * * *", "handler": "testapp.nothing"}


@pytest.fixture
def declaring(child_environment: dict[str, str]) -> Callable[..., dict[str, str]]:
    """The environment of a process that declares schedules."""

    def environment(*declared: dict[str, Any]) -> dict[str, str]:
        return environment_with(child_environment, QUICK, TEST_SCHEDULES=json.dumps(declared))

    return environment


def test_worker_processes_fire_and_end(
    declaring: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    schedule(**TICK)
    run_schedules()
    owed = owe("tick", 3)
    worker = Process(declaring(TICK), ["--processes=2", "--threads=1"], tmp_path / "log")
    try:
        until(lambda: Job.objects.filter(status="succeeded").count() >= 3)
        worker.send()
        assert worker.ends() == 0
    finally:
        worker.end_now()
    assert fired()[:3] == owed
    # A deploy that changes the cron: no process serves, and the last line says what to do.
    changed = Process(declaring({**TICK, "cron": "*/5 * * * *"}), [], tmp_path / "changed")
    try:
        assert changed.ends() == 2
    finally:
        changed.end_now()
    assert "manage.py jobs adopt-schedule tick" in changed.output()
    assert "Traceback" not in changed.output()
    assert "Worker " not in changed.output()


DYING = """
import django, sys, time
django.setup()
from django_durable_jobs.models import Job
from django_durable_jobs.schedules import cursors
from django_durable_jobs.schedules.passes import Scheduler
plain = cursors.move
def move(*arguments):
    if sys.argv[1] == "after the cursor":
        plain(*arguments)
    assert Job.objects.count() >= 3
    print("now", flush=True)
    time.sleep(600)
cursors.move = move
Scheduler("default").run()
"""


@pytest.mark.parametrize("when", ["before the cursor", "after the cursor"])
def test_a_process_killed_in_mid_pass_leaves_nothing_of_it(
    declaring: Callable[..., dict[str, str]], when: str
) -> None:
    schedule(**TICK)
    run_schedules()
    owed = owe("tick", 3)
    before = list(ScheduleCursor.objects.values())
    command = [sys.executable, "-c", DYING, when]
    with subprocess.Popen(
        command, env=declaring(TICK), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "now\n"
        assert fired() == []
        process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE) == -signal.SIGKILL
    assert fired() == []
    assert list(ScheduleCursor.objects.values()) == before
    assert registry.get("tick") is not None
    until(lambda: run_schedules() or fired(), "the dead one's lock to go")
    assert fired()[:3] == owed
