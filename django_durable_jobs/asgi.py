"""A worker inside an ASGI server's process, for as long as that serves (CONTRACT 4.10)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from inspect import signature
from typing import Any

from django.db import connections

from .exceptions import DurableJobsError
from .worker.loop import DRAINED
from .worker.options import (
    InvalidOptions,
    MigrationsMissing,
    QueueNames,
    WorkerOptions,
    build_options,
    check_arguments,
    in_python,
)
from .worker.run import run_worker
from .worker.signals import Stop

logger = logging.getLogger("django_durable_jobs.worker")

# A server obeys no signal while it starts: a database that is away must not hold it up.
START_SECONDS = 5.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]


class WorkerNotStarted(DurableJobsError):
    """The worker cannot start; the text is the sentence that ``runjobs`` would end with."""


@asynccontextmanager
async def embedded_worker(
    *,
    queues: QueueNames | None = None,
    exclude_queues: QueueNames | None = None,
    threads: int | None = None,
    name: str | None = None,
    database: str | None = None,
    schedules: bool = True,
) -> AsyncIterator[None]:
    """Run a worker in a thread of this process while the body runs; for an asyncio event loop.

    The options are those of ``runjobs`` with ``--processes 0``; queues may be given as a list
    or tuple of names too. It installs no signal handlers.
    Raises ``WorkerNotStarted`` where ``runjobs`` would refuse to start; a database that is away
    is waited for beside the body. At the end nothing more is claimed and the handlers have the
    time of a shutdown (CONTRACT 4.7). What does not end then ends with the process; a job that
    is left running is brought back by its lease.
    """

    def options() -> WorkerOptions:
        return build_options(
            queues=queues,
            exclude_queues=exclude_queues,
            threads=threads,
            name=name,
            database=database,
            processes=0,
            no_schedules=not schedules,
            written=in_python,
        )

    beside = _Beside(options)
    try:
        await beside.start()
        yield
    finally:
        await beside.stop()


def with_worker(application: Application, **options: Any) -> Application:
    """Wrap an ASGI application so that a worker runs from the server's start to its shutdown.

    ``options`` are those of ``embedded_worker``. The lifespan is answered here and not passed
    on, since Django's application has none; one that has enters ``embedded_worker`` in its own.
    Raises at once ``TypeError`` for an option that is none, and ``WorkerNotStarted`` for a value
    that cannot be used; what else refuses a start fails the server's.
    """
    _check(options)

    async def serve(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await application(scope, receive, send)
            return
        await receive()
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(embedded_worker(**options))
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    return serve


def _check(options: dict[str, Any]) -> None:
    try:
        signature(embedded_worker).bind(**options)
    except TypeError as error:
        raise TypeError(f"with_worker() {error}") from None
    try:
        check_arguments(**options)
    except InvalidOptions as error:
        raise WorkerNotStarted(str(error)) from None


class _Beside:
    """A worker in a thread, and what an event loop may wait for of it."""

    def __init__(self, options: Callable[[], WorkerOptions]) -> None:
        self._options = options
        self._stop = Stop()
        self._loop = asyncio.get_running_loop()
        self._settled = asyncio.Event()  # started, or ended before that
        self._ended = asyncio.Event()
        self._serving = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="durable-worker", daemon=True)

    async def start(self) -> None:
        self._thread.start()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), START_SECONDS)
        # In this order: an error from here on is raised below, or reported by the thread.
        self._serving = True
        if isinstance(self._error, InvalidOptions | MigrationsMissing):
            # The sentence says it all: a server would print the whole chain before it.
            raise WorkerNotStarted(str(self._error)) from None
        if self._error is not None:
            raise self._error
        if not self._settled.is_set():
            logger.warning("serving without the worker, which waits for the database")

    async def stop(self) -> None:
        self._stop.ask()
        await self._ended.wait()

    def _run(self) -> None:
        code = None
        try:
            code = run_worker(
                self._options(),
                owns_process=False,
                started=self._started,
                stop=self._stop,
            )
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()
            self._report(code)
            self._tell(self._settled)
            self._tell(self._ended)

    def _started(self, options: WorkerOptions) -> None:
        logger.info("%s", options.banner)
        self._tell(self._settled)

    def _report(self, code: int | None) -> None:
        if self._serving and not self._stop.is_asked():
            logger.critical(
                "the worker in this process has ended, and nothing runs its jobs until it is"
                " started again: %s",
                self._error or f"it gave up with exit code {code}",
            )
        elif code not in (None, DRAINED):
            logger.error(
                "some handlers did not stop and end with the process; a job that is left running"
                " is brought back by its lease"
            )

    def _tell(self, event: asyncio.Event) -> None:
        # A server that was ended at once has closed its loop.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(event.set)
