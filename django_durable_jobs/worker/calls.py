"""Call a handler's function: sync in the slot's thread, async on the process's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async

from ..exceptions import JobTimeout
from ..handlers import Handler
from . import connections
from .context import JobContext


class EventLoop:
    """One event loop in a thread of its own, started by the first async handler."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._calls = 0
        self._stopping = False

    def call(self, coroutine: Coroutine[Any, Any, Any], ctx: JobContext, timeout: float) -> Any:
        """Run to the end; the task is cancelled at the attempt's deadline (CONTRACT 4.5)."""
        loop = self._enter()
        try:
            future = asyncio.run_coroutine_threadsafe(_alone(coroutine, ctx, timeout), loop)
            result, error = future.result()
        finally:
            self._leave()
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """End the loop, at once or with the handler that does not end."""
        with self._lock:
            self._stopping = True
            is_idle = self._calls == 0
        if is_idle:
            self._end()

    def _enter(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            self._calls += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="durable-async", daemon=True
                )
                self._thread.start()
            return self._loop

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            is_last = self._stopping and self._calls == 0
        if is_last:
            self._end()

    def _end(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_the_rest(), loop)
        thread.join(5)
        if not thread.is_alive():
            loop.close()


async def _cancel_the_rest() -> None:
    """Cancel what handlers have started and not awaited; then stop the loop."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=1)
    asyncio.get_running_loop().stop()


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
        coroutine.close()
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
