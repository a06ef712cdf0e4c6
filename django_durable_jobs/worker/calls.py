"""Call a handler's function: sync in the slot's thread, async on the process's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async

from ..exceptions import JobInterrupt, JobTimeout
from ..handlers import Handler
from . import connections
from .context import JobContext


class RunningLoop:
    """An event loop in a thread of its own, until it is told to end.

    An exit that some task raises is that task's own, and so is a handler's ``loop.stop()``.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="durable-async", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.loop.close()
            raise

    def end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel_the_rest(), self.loop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self.loop.close()

    def _run(self) -> None:
        while not self._over:
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    async def _cancel_the_rest(self) -> None:
        """Cancel what handlers have started and not awaited; then stop the loop."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=1)
        self._over = True
        self.loop.stop()


class EventLoop:
    """One event loop for all async handlers, started by the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: RunningLoop | None = None
        self._calls = 0
        self._stopping = False

    def call(self, coroutine: Coroutine[Any, Any, Any], ctx: JobContext, timeout: float) -> Any:
        """Run to the end; the task is cancelled at the attempt's deadline (CONTRACT 4.5)."""
        # One that has never begun, as without a loop or past its deadline, is to be closed.
        with closing(coroutine), self._entered() as loop:
            future = asyncio.run_coroutine_threadsafe(_alone(coroutine, ctx, timeout), loop)
            result, error = future.result()
        if error is not None:
            raise _plain(error)
        return result

    def stop(self) -> None:
        """End the loop, at once or with the handler that does not end."""
        with self._lock:
            self._stopping = True
            is_idle = self._calls == 0
        if is_idle:
            self._end()

    @contextmanager
    def _entered(self) -> Iterator[asyncio.AbstractEventLoop]:
        with self._lock:
            if self._running is None:
                self._running = RunningLoop()
            self._calls += 1
            loop = self._running.loop
        try:
            yield loop
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            is_last = self._stopping and self._calls == 0
        if is_last:
            self._end()

    def _end(self) -> None:
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.end()


End = tuple[Any, BaseException | None]


async def _alone(coroutine: Coroutine[Any, Any, Any], ctx: JobContext, timeout: float) -> End:
    """Run with a thread of its own for ``sync_to_async``, and so with its own connections.

    The thread that asgiref else shares would carry a broken connection to every later job.
    """
    async with ThreadSensitiveContext():
        try:
            return await _bounded(coroutine, ctx, timeout)
        finally:
            await sync_to_async(connections.close_all)()


async def _bounded(coroutine: Coroutine[Any, Any, Any], ctx: JobContext, timeout: float) -> End:
    task = asyncio.ensure_future(_caught(coroutine))
    alarm = asyncio.get_running_loop().call_later(timeout, task.cancel)
    try:
        result, error = await task
    except asyncio.CancelledError as cancelled:
        # The alarm rang before the coroutine had begun.
        result, error = None, cancelled
    finally:
        alarm.cancel()
    if isinstance(error, asyncio.CancelledError) and ctx.timed_out():
        error = JobTimeout("the attempt has passed its deadline")
    return result, error


async def _caught(coroutine: Coroutine[Any, Any, Any]) -> End:
    """Give what the handler raised as a value: asyncio ends the loop for some of it."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


def _plain(error: BaseException) -> BaseException:
    """Give the stop that a ``TaskGroup`` has wrapped, if nothing else went wrong in it."""
    while isinstance(error, BaseExceptionGroup) and error.split(JobInterrupt)[1] is None:
        error = error.exceptions[0]
    return error


class Caller:
    """What ``execution.execute`` calls; owns the event loop."""

    def __init__(self) -> None:
        self._events = EventLoop()

    def __call__(self, handler: Handler[..., Any], ctx: JobContext, *payload: Any) -> Any:
        if not handler.is_async:
            return handler.func(ctx, *payload)
        timeout = max(0.0, ctx.remaining())
        return self._events.call(handler.func(ctx, *payload), ctx, timeout)

    def stop(self) -> None:
        self._events.stop()
