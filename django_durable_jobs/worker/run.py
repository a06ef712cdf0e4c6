"""Start a worker: check, then work in this process or under a supervisor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from django.db import connections
from django.db.migrations.executor import MigrationExecutor

from ..dialects.base import refuse_open_transaction
from ..exceptions import TransactionActive
from ..transactions import in_test_wrapper
from .connections import close_before_fork
from .loop import Worker
from .options import InvalidOptions, MigrationsMissing, WorkerOptions
from .signals import stop_at_end_of, stop_on_signal
from .supervisor import Supervisor

APP = "django_durable_jobs"


def run_worker(
    options: WorkerOptions, *, owns_process: bool, started: Callable[[WorkerOptions], None]
) -> int:
    """Run until the end and give the exit code.

    Raises ``InvalidOptions`` inside an open transaction and ``MigrationsMissing``.
    """
    _refuse_transaction(options.alias)
    _require_migrations(options.alias)
    started(options)
    if options.until_idle or options.processes == 0:
        return _work(options, owns_process=owns_process)
    close_before_fork()

    def work(number: int, pipe: int) -> int:
        named = replace(options, name=f"{options.name}/{number + 1}")
        return _work(named, owns_process=True, parent=pipe)

    return Supervisor(options.processes, work).run()


def _work(options: WorkerOptions, *, owns_process: bool, parent: int | None = None) -> int:
    worker = Worker(options, owns_process=owns_process, is_replaced=parent is not None)
    with stop_on_signal(worker.stop):
        if parent is not None:
            stop_at_end_of(parent, worker.stop)
        return worker.run()


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


def _require_migrations(alias: str) -> None:
    executor = MigrationExecutor(connections[alias])
    targets = [key for key in executor.loader.graph.leaf_nodes() if key[0] == APP]
    missing = [migration.name for migration, _ in executor.migration_plan(targets)]
    if missing:
        raise MigrationsMissing(
            f'database "{alias}" lacks {", ".join(missing)} of {APP}:'
            f" run manage.py migrate --database {alias}."
        )
