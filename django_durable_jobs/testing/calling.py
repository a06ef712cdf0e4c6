"""Call a handler in the test's own thread and leave its connections as a worker would."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from asgiref.sync import async_to_sync
from django.db import connections
from django.db.transaction import TransactionManagementError

from ..handlers import Handler
from ..transactions import in_test_wrapper
from ..worker.connections import clean
from ..worker.context import JobContext

logger = logging.getLogger("django_durable_jobs.worker")


class TestCall:
    """What ``execute()`` calls in a test; ``raised`` is what came out of the handler."""

    __test__ = False

    def __init__(self, within: AbstractContextManager[Any]) -> None:
        self._within = within
        self.raised: BaseException | None = None

    def __call__(self, handler: Handler[..., Any], ctx: JobContext, *payload: Any) -> Any:
        try:
            with left_clean(), self._within:
                return _call(handler, ctx, *payload)
        except BaseException as error:
            self.raised = error
            raise


@contextmanager
def left_clean() -> Iterator[None]:
    """Leave the connections as a worker would, whatever the project's code does with them."""
    wrapped = [one for one in connections.all(initialized_only=True) if in_test_wrapper(one)]
    try:
        with ExitStack() as stack:
            for connection in wrapped:
                stack.enter_context(_kept(connection))
            yield
    finally:
        if not wrapped:
            clean()


def _call(handler: Handler[..., Any], ctx: JobContext, *payload: Any) -> Any:
    process = os.getpid()
    try:
        if handler.is_async:
            # The loop runs where asgiref puts it; its database work comes back to this thread.
            return async_to_sync(handler.func)(ctx, *payload)
        return handler.func(ctx, *payload)
    finally:
        if os.getpid() != process:
            # The handler forked and its child came back here: test and connections are not its.
            os._exit(1)


@contextmanager
def _kept(connection: Any) -> Iterator[None]:
    """Let a TestCase's transaction stand for "no transaction", whatever the handler does there.

    What it left open is rolled back. Its ``on_commit`` callbacks are called, since nothing
    will commit. A ``close()`` is not obeyed: the test's rows would go with it.
    """
    before = _Before(
        # A savepoint without a block: the handler starts outside of any atomic().
        savepoint=connection.savepoint(),
        blocks=len(connection.atomic_blocks),
        savepoints=len(connection.savepoint_ids),
        callbacks=len(connection.run_on_commit),
    )
    try:
        with patch.object(connection, "close", _ignore):
            try:
                yield
            finally:
                _undo_open_blocks(connection, before)
                _call_back(connection, before)
    except BaseException:
        _settle(connection, before)
        raise
    if not _settle(connection, before):
        raise TransactionManagementError(
            "The handler has broken the transaction of the TestCase: it went on after a database"
            " error outside of an atomic() of its own, or left an atomic(savepoint=False) open. All"
            " that it wrote is lost. Give the statement that may fail a transaction.atomic(), or"
            " use a TransactionTestCase."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """A savepoint, and how many blocks, savepoints and callbacks the connection had."""

    savepoint: str
    blocks: int
    savepoints: int
    callbacks: int


def _ignore() -> None:
    pass


def _undo_open_blocks(connection: Any, before: _Before) -> None:
    """Roll back the outermost atomic() that the handler has left open, and what is inside."""
    left_open = connection.savepoint_ids[before.savepoints :]
    del connection.savepoint_ids[before.savepoints :], connection.atomic_blocks[before.blocks :]
    if left_open and left_open[0] is not None:
        connection.needs_rollback = False
        connection.savepoint_rollback(left_open[0])
    elif left_open:
        # It had no savepoint of its own: all that the handler wrote goes.
        connection.needs_rollback = True


def _call_back(connection: Any, before: _Before) -> None:
    """Call what the handler has given to ``on_commit()``, in that order, up to an error."""
    while len(connection.run_on_commit) > before.callbacks and _is_whole(connection):
        _, call, robust = connection.run_on_commit.pop(before.callbacks)
        try:
            call()
        except Exception:
            if not robust:
                raise
            logger.exception("a robust on_commit() callback raised")


def _settle(connection: Any, before: _Before) -> bool:
    """End the savepoint around the handler; False where all that it wrote had to go."""
    _undo_open_blocks(connection, before)
    is_whole = _is_whole(connection)
    connection.needs_rollback = False
    del connection.run_on_commit[before.callbacks :]
    if not is_whole:
        connection.savepoint_rollback(before.savepoint)
    connection.savepoint_commit(before.savepoint)
    return is_whole


def _is_whole(connection: Any) -> bool:
    """Tell whether the transaction takes another statement; a failed one on PostgreSQL does not."""
    return not connection.needs_rollback and bool(connection.is_usable())
