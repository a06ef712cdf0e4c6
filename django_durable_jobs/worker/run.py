"""Start a worker: check, then work in this process or under a supervisor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from django.db import DatabaseError, InterfaceError, connections

from ..conf import settings
from ..dialects import dialect_for
from ..dialects.base import refuse_open_transaction
from ..exceptions import InvalidSchedule, TransactionActive
from ..schedules.cursors import require_adopted
from ..schedules.declaration import registry as schedules
from ..transactions import in_test_wrapper
from .connections import clean, close_before_fork, own
from .lifeline import ChildEnd
from .lifetime import HeartbeatFile
from .loop import DRAINED, Worker
from .options import InvalidOptions, WorkerOptions
from .reloading import Reloading
from .schema import require_migrations
from .signals import Stop
from .supervised import backoff, is_transient
from .supervisor import Limits, Supervisor

MIN_SILENCE_SECONDS = 5.0
logger = logging.getLogger("django_durable_jobs.worker")


def run_worker(
    options: WorkerOptions,
    *,
    owns_process: bool,
    started: Callable[[WorkerOptions], None],
    stop: Stop,
) -> int:
    """Run until the end and give the exit code; a stop may be asked for at any time.

    Raises ``InvalidOptions`` inside an open transaction or for a schedule whose cron is
    another than the stored one (CONTRACT 5.3), and ``MigrationsMissing``.
    """
    if not _when_database_answers(options, stop):
        return DRAINED
    started(options)
    with _heartbeat(options) as heartbeat:
        # Where a process cannot fork, this one works alone.
        if options.reload or options.until_idle or not options.processes or not hasattr(os, "fork"):
            return _work(options, stop, owns_process=owns_process, heartbeat=heartbeat)
        return _supervise(options, stop, heartbeat)


@contextmanager
def _heartbeat(options: WorkerOptions) -> Iterator[HeartbeatFile | None]:
    if options.heartbeat_file is None:
        yield None
        return
    heartbeat = HeartbeatFile(options.heartbeat_file)
    try:
        yield heartbeat
    finally:
        heartbeat.remove()


def _supervise(options: WorkerOptions, stop: Stop, heartbeat: HeartbeatFile | None) -> int:
    close_before_fork()

    def work(number: int, parent: ChildEnd, stop: Stop) -> int:
        named = replace(options, name=f"{options.name}/{number + 1}")
        return _work(named, stop, owns_process=True, parent=parent)

    limits = Limits(
        # Of a child that was silent for a whole lease no job is its own any more.
        silence=max(MIN_SILENCE_SECONDS, float(settings.LEASE_SECONDS)),
        stop=float(settings.SHUTDOWN_SECONDS) + float(settings.TIMEOUT_GRACE_SECONDS),
    )
    bounded = options.max_jobs is not None
    supervisor = Supervisor(options.processes, work, limits, bounded=bounded, heartbeat=heartbeat)
    return supervisor.run(stop)


def _work(
    options: WorkerOptions,
    stop: Stop,
    *,
    owns_process: bool,
    parent: ChildEnd | None = None,
    heartbeat: HeartbeatFile | None = None,
) -> int:
    worker = Worker(options, owns_process=owns_process, parent=parent, heartbeat_file=heartbeat)
    stop.hand_to(worker.stop)
    if options.reload:
        return _work_and_reload(worker, stop, owns_process=owns_process)
    if parent is not None:
        parent.watch(stop.ask)
    return worker.run()


def _work_and_reload(worker: Worker, stop: Stop, *, owns_process: bool) -> int:
    if not owns_process:
        raise InvalidOptions("--reload works on the command line only: it replaces the process.")
    reloading = Reloading()
    reloading.watch(worker.stop)
    return reloading.begin_again(worker.run(), stop)


def _refuse_transaction(alias: str) -> None:
    sentence = (
        "the worker cannot run inside a transaction or a TestCase: use"
        " django_durable_jobs.testing.drain() there, or a TransactionTestCase."
    )
    if in_test_wrapper(connections[alias]):
        raise InvalidOptions(sentence)
    try:
        refuse_open_transaction(alias)
    except TransactionActive:
        raise InvalidOptions(sentence) from None


def _when_database_answers(options: WorkerOptions, stop: Stop) -> bool:
    """Check what it says; wait a restart of it out, as the worker does later on (4.8).

    Gives False if a stop was asked for meanwhile. Raises ``InvalidOptions`` where the database
    refuses whoever comes with these settings, which does not pass.
    """
    failures = 0
    while not stop.is_asked():
        try:
            _check_database(options)
            break
        except (DatabaseError, InterfaceError) as error:
            clean()
            _refuse_if_refused(options.alias, error)
            if not is_transient(options.alias, error):
                raise
            failures += 1
            logger.warning("the start waits for the database: %s", _first_line(error))
            stop.wait(backoff(failures))
    return not stop.is_asked()


def _refuse_if_refused(alias: str, error: Exception) -> None:
    code = dialect_for(alias).refusal(error)
    if code is not None:
        raise InvalidOptions(
            f'database "{alias}" does not let this worker in: {_first_line(error)} ({code})'
        ) from error


def _first_line(error: Exception) -> str:
    """Give the driver's own sentence: it names host, role and database, and no password."""
    return str(error).partition("\n")[0] or type(error).__name__


def _check_database(options: WorkerOptions) -> None:
    # A connection that nobody has opened yet is in no transaction, and is not opened for that: only
    # our own is, whose settings bound the wait.
    if connections[options.alias].connection is not None:
        _refuse_transaction(options.alias)
    with own(options.alias, patient=options.until_idle):
        _refuse_transaction(options.alias)
        require_migrations(options.alias)
        if options.schedules:
            _require_adopted(options.alias)


def _require_adopted(alias: str) -> None:
    try:
        require_adopted(alias, schedules.all())
    except InvalidSchedule as error:
        raise InvalidOptions(str(error)) from None
