"""A worker in an ASGI server's process, from its start to its shutdown (CONTRACT 4.10)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.asgi import get_asgi_application
from django.db import connection, connections
from django.db.migrations.recorder import MigrationRecorder

from django_durable_jobs import JobContext, asgi, job
from django_durable_jobs.asgi import WorkerNotStarted, embedded_worker, with_worker
from django_durable_jobs.handlers import Registry
from django_durable_jobs.models import LiveWorker

from .._proxy import Proxy
from ..testapp import jobs
from .support import PATIENCE, Background, Gate, fresh, only_attempt, until

pytestmark = pytest.mark.django_db(transaction=True)


class Server:
    """What a server does with an application's lifespan, with an event loop in a thread."""

    def __init__(self, **options: Any) -> None:
        self.application = with_worker(get_asgi_application(), **options)
        self.answers: list[dict[str, Any]] = []
        self._ready = threading.Event()
        self._running = Background(lambda: asyncio.run(self._serve()))
        assert self._ready.wait(PATIENCE)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._ready.set()
        await self.application({"type": "lifespan"}, self._inbox.get, self._answer)

    async def _answer(self, message: Any) -> None:
        self.answers.append(message)

    def tell(self, word: str) -> Any:
        """Send an event of the lifespan and give the answer to it."""
        known = len(self.answers)
        message = {"type": f"lifespan.{word}"}
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, message)
        until(lambda: len(self.answers) > known, f"the answer to {word}")
        return self.answers[-1]

    def tell_if_it_runs(self, word: str) -> None:
        if self._running.is_alive:
            self.tell(word)

    def get(self, path: str) -> int:
        """Ask the application itself, and give the status."""
        sent: list[Any] = []

        async def ask() -> None:
            scope = {"type": "http", "method": "GET", "path": path, "query_string": b""}
            inbox: asyncio.Queue[Any] = asyncio.Queue()
            inbox.put_nowait({"type": "http.request", "body": b""})

            async def answer(message: Any) -> None:
                sent.append(message)

            headers = [(b"host", b"testserver")]
            await self.application({**scope, "headers": headers}, inbox.get, answer)

        asyncio.run_coroutine_threadsafe(ask(), self._loop).result(PATIENCE)
        return int(sent[0]["status"])

    def ends(self) -> None:
        self._running.ends()


def worker_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("durable-")]


@pytest.fixture
def serve(
    durable_jobs: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Server]]:
    """Start a server; all have ended when the test is over, with the threads of their workers."""
    durable_jobs(POLL_SECONDS=0.05, SHUTDOWN_SECONDS=0.2, TIMEOUT_GRACE_SECONDS=PATIENCE)
    monkeypatch.setattr(asgi, "START_SECONDS", PATIENCE)
    started: list[Server] = []

    def start(**options: Any) -> Server:
        started.append(Server(**options))
        return started[-1]

    yield start
    for server in started:
        server.tell_if_it_runs("shutdown")
        server.ends()
    until(lambda: not worker_threads(), "its threads to end")


def test_it_runs_jobs_beside_requests_and_hands_them_back_at_the_end(
    serve: Callable[..., Server], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "django_durable_jobs")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    server = serve(threads=2, name="beside")
    assert server.tell("startup") == {"type": "lifespan.startup.complete"}
    done = jobs.nothing.submit()
    until(lambda: fresh(done).status == "succeeded")
    stopped = jobs.obedient.submit(jobs.Gate(**gate.payload("stopped")))
    gate.begun("stopped")
    assert server.get("/nothing") == 404
    until(LiveWorker.objects.exists, "the worker's row")
    assert LiveWorker.objects.get().name == "beside"
    assert "Worker beside on database default: all queues; 1 x 2 slots." in caplog.messages
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert server.tell("shutdown") == {"type": "lifespan.shutdown.complete"}
    server.ends()
    assert "stopping; it holds 1 job" in caplog.messages
    # As by a signal: queued again, its execution granted once more (CONTRACT 4.7).
    assert (fresh(stopped).status, fresh(stopped).granted_attempts) == ("queued", 1)
    assert only_attempt(stopped).outcome == "stopped"
    assert not LiveWorker.objects.exists()


@pytest.mark.parametrize("why", ["option", "migration"])
def test_a_worker_that_cannot_start_fails_the_servers_start(
    serve: Callable[..., Server], why: str
) -> None:
    if why == "migration":
        MigrationRecorder.Migration.objects.filter(app="django_durable_jobs").delete()
    server = serve(**({"queues": "a", "exclude_queues": ["a"]} if why == "option" else {}))
    try:
        answer = server.tell("startup")
    finally:
        if why == "migration":
            MigrationRecorder(connection).record_applied("django_durable_jobs", "0001_initial")
    assert answer["type"] == "lifespan.startup.failed"
    refused = "exclude_queues leaves no queue of queues"
    sentence = refused if why == "option" else "lacks 0001_initial of django"
    assert sentence in answer["message"]
    server.ends()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="a file is there or is not")
def test_a_database_that_is_away_holds_up_neither_start_nor_end(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(asgi, "START_SECONDS", 0.2)
    settings = connections.settings["default"]
    port = int(settings["PORT"])
    proxy = Proxy(port, opened=False)
    connection.ensure_connection()
    monkeypatch.setitem(settings, "HOST", "127.0.0.1")
    monkeypatch.setitem(settings, "PORT", str(proxy.port))
    never = serve()
    assert never.tell("startup")["type"] == "lifespan.startup.complete"
    assert "serving without the worker, which waits for the database" in caplog.text
    assert never.tell("shutdown")["type"] == "lifespan.shutdown.complete"
    never.ends()
    later = serve()
    assert later.tell("startup")["type"] == "lifespan.startup.complete"
    proxy.open()
    one = jobs.nothing.submit()
    until(lambda: fresh(one).status == "succeeded")
    assert later.tell("shutdown")["type"] == "lifespan.shutdown.complete"
    later.ends()
    proxy.close()


def test_the_context_manager_stops_it_whatever_the_body_raises(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a worker that ends by itself is told of loudly, once; the server serves on."""

    async def body() -> None:
        async with embedded_worker(threads=1):
            raise LookupError("the server's own")

    with pytest.raises(LookupError):
        Background(lambda: asyncio.run(body())).ends()

    begun = threading.Event()

    def crash(options: Any, *, started: Callable[[Any], None], **more: Any) -> int:
        started(options)
        assert begun.wait(PATIENCE)
        raise RuntimeError("a fault of ours")

    async def serves_on() -> int:
        async with embedded_worker():
            begun.set()
            while "has ended" not in caplog.text:
                await asyncio.sleep(0.01)
            return os.getpid()

    monkeypatch.setattr(asgi, "run_worker", crash)
    assert Background(lambda: asyncio.run(serves_on())).ends() == os.getpid()
    (told,) = [one for one in caplog.records if one.levelname == "CRITICAL"]
    assert "a fault of ours" in told.getMessage()


def test_a_refusal_is_an_error_of_ours_in_the_context_manager(
    serve: Callable[..., Server],
) -> None:
    async def refused() -> None:
        async with embedded_worker(queues=""):
            raise AssertionError("not reached")

    with pytest.raises(WorkerNotStarted, match="^queues must have 1 to 100") as caught:
        Background(lambda: asyncio.run(refused())).ends()
    # One traceback, the sentence last: a server prints no chain before it.
    assert "InvalidOptions" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("queues", [["a", "b"], ("a", "b"), "a, b"])
def test_queues_are_named_by_text_or_by_a_list(
    serve: Callable[..., Server], queues: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "django_durable_jobs")
    server = serve(queues=queues, exclude_queues=["b"], threads=1, name="me")
    assert server.tell("startup")["type"] == "lifespan.startup.complete"
    assert "Worker me on database default: a; 1 x 1 slots." in caplog.messages


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"threads": 0}, "threads must be a whole number from 1 to 1000."),
        ({"threads": "4"}, "threads must be a whole number from 1 to 1000."),
        ({"queues": 5}, "queues must name queues: text with commas, or a list of names."),
        ({"queues": []}, "queues must name queues: text with commas, or a list of names."),
        ({"queues": ["a", 5]}, "queues must be str, not int."),
        ({"exclude_queues": {"a"}}, "exclude_queues must name queues: text with commas"),
        ({"name": 5}, "name must be str, not int."),
        ({"database": "nowhere"}, 'database "nowhere" is not in DATABASES'),
        ({"database": ["default"]}, "is not in DATABASES"),
        ({"schedules": "no"}, "schedules must be True or False."),
        ({"processes": 4}, "with_worker() got an unexpected keyword argument 'processes'"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_where_it_is_written(
    options: dict[str, Any], sentence: str
) -> None:
    error = TypeError if "processes" in options else WorkerNotStarted
    with pytest.raises(error) as caught:
        with_worker(get_asgi_application(), **options)
    assert sentence in str(caught.value)
    assert "--" not in str(caught.value)


def test_a_handler_that_is_left_behind_is_told_of_as_it_is(
    serve: Callable[..., Server],
    handlers: Registry,
    durable_jobs: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its job has ended by the hard limit: no lease brings that one back."""
    durable_jobs(POLL_SECONDS=0.05, SHUTDOWN_SECONDS=0.2, TIMEOUT_GRACE_SECONDS=0.1)
    go = threading.Event()

    @job("asgi.stuck", timeout=50, max_attempts=1)
    def stuck(ctx: JobContext) -> None:
        # However late it has begun: now its time is over.
        ctx._deadline = time.monotonic()
        go.wait(PATIENCE)

    try:
        server = serve(threads=2)
        server.tell("startup")
        one = stuck.submit()
        until(lambda: fresh(one).status == "failed")
        assert server.tell("shutdown") == {"type": "lifespan.shutdown.complete"}
        server.ends()
    finally:
        go.set()
    (told,) = [one for one in caplog.messages if "did not stop" in one]
    assert told == (
        "some handlers did not stop and end with the process; a job that is left running is"
        " brought back by its lease"
    )
    assert fresh(one).status == "failed"
