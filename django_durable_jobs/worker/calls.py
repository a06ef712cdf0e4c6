"""Call a handler's function: sync in the slot's thread, async on the process's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from ..exceptions import JobTimeout
from ..handlers import Handler
from .context import JobContext


class EventLoop:
    """One event loop in a thread of its own, started by the first async handler."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def call(self, coroutine: Coroutine[Any, Any, Any], ctx: JobContext, timeout: float) -> Any:
        """Run to the end; the task is cancelled at the attempt's deadline (CONTRACT 4.5)."""
        future = asyncio.run_coroutine_threadsafe(
            _bounded(coroutine, ctx, timeout), self._started()
        )
        return future.result()

    def stop(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5)
            if not thread.is_alive():
                loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="durable-async", daemon=True
                )
                self._thread.start()
            return self._loop


async def _bounded(coroutine: Coroutine[Any, Any, Any], ctx: JobContext, timeout: float) -> Any:
    task = asyncio.ensure_future(coroutine)
    alarm = asyncio.get_running_loop().call_later(timeout, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        if ctx.timed_out():
            raise JobTimeout("the attempt has passed its deadline") from None
        raise
    finally:
        alarm.cancel()


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
