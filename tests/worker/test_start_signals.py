"""Signals that come while a worker starts are obeyed as later ones are (CONTRACT 4.7)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from django_durable_jobs.worker.signals import Stop

from .._marks import no_database
from ..testapp import jobs
from .conftest import StartWorker
from .support import Background, Process, attempts, fresh, until

pytestmark = pytest.mark.django_db(transaction=True)

MODULE = "tests.worker.signalled_start"
ALONE, SUPERVISED = ["--processes=0"], ["--processes=1"]
StartSignalled = Callable[..., Process]


@pytest.fixture
def start_signalled(start_worker: StartWorker) -> StartSignalled:
    def start(moment: str, by: str, arguments: list[str]) -> Process:
        variables = {"SIGNALLED_AT": moment, "SIGNALLED_BY": by}
        return start_worker(*arguments, variables=variables, module=MODULE)

    return start


@pytest.mark.parametrize(
    ("moment", "arguments", "by"),
    [
        ("check", ALONE, "SIGTERM"),
        # To parent and child at once, as a terminal and a service manager do.
        ("group", SUPERVISED, "SIGINT"),
        pytest.param("banner", SUPERVISED, "SIGTERM", marks=no_database),
        pytest.param("worker", ["--drain"], "SIGINT", marks=no_database),
        # To the child alone: with a bounded run nobody replaces it.
        pytest.param("child", ["--processes=1", "--max-jobs=1"], "SIGTERM", marks=no_database),
        pytest.param("exec", ["--reload"], "SIGTERM", marks=no_database),
    ],
)
def test_one_that_comes_during_the_start_ends_it_with_0_and_nothing_is_claimed(
    start_signalled: StartSignalled, moment: str, arguments: list[str], by: str
) -> None:
    waiting = jobs.nothing.submit()
    worker = start_signalled(moment, by, arguments)
    assert worker.ends() == 0, worker.output()
    assert (fresh(waiting).attempt_count, attempts(waiting)) == (0, [])
    assert "Traceback" not in worker.output()
    assert ("Worker " in worker.output()) is (moment != "check")


@no_database
def test_two_that_come_during_the_start_end_it_now(start_signalled: StartSignalled) -> None:
    worker = start_signalled("check", "SIGTERM,SIGINT", ALONE)
    assert worker.ends() == 5, worker.output()


@no_database
def test_a_stop_is_remembered_until_there_is_somebody_to_tell() -> None:
    stop, told = Stop(), queue.SimpleQueue[str]()
    assert not stop.wait(0)
    stop.ask()
    assert stop.is_asked()
    stop.hand_to(lambda: told.put("at once"))
    assert told.get_nowait() == "at once"
    stop.ask()
    assert told.get_nowait() == "at once"
    # Nobody who waits is left waiting, however often.
    assert stop.wait(3600)
    assert stop.wait(3600)


@no_database
def test_a_stop_ends_a_wait_from_another_thread() -> None:
    stop = Stop()
    waiting = Background(lambda: stop.wait(3600))
    until(lambda: threading.active_count() > 1)
    stop.ask()
    assert waiting.ends() is True
