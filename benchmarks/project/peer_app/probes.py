"""What is measured of django-tasks-db inside a process."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from django.core.management import call_command
from django.db import connection, transaction
from django.utils import timezone
from django_tasks_db.models import DBTaskResult
from django_tasks_db.utils import exclusive_transaction

from copies import copy_row, settle, uuid_key
from timing import Run, drained, rates, summary

from .tasks import noop

TABLE = DBTaskResult._meta.db_table
WARM_UP = 50
FAR = timedelta(days=30)
HIGHEST = 100


def migrate() -> None:
    call_command("migrate", verbosity=0)


def enqueue(*, count: int, rounds: int = 10) -> dict[str, float]:
    """Make tasks one by one, in both ways; give tasks per second."""
    ways = {"enqueue": _enqueue, "enqueue_atomic": _enqueue_in_atomic}
    for way in ways.values():
        way(WARM_UP)
    return rates(ways, count=count, rounds=rounds)


def bulk(*, count: int) -> dict[str, float]:
    """Make ``count`` tasks in one transaction; there is no call for many."""
    _enqueue(WARM_UP)
    return rates({"enqueue_in_one_transaction": _enqueue_together}, count=count, rounds=1)


def fill(*, count: int) -> dict[str, int]:
    """Make the tasks of a drain."""
    _enqueue_together(count)
    settle()
    return {}


def result(*, count: int) -> dict[str, float]:
    """Judge a drain by its rows; those that stood in the way were run by no worker."""
    found = DBTaskResult.objects.filter(status="SUCCESSFUL").exclude(worker_ids=["elsewhere"])
    rows = list(found.order_by().values_list("worker_ids", "started_at", "finished_at"))
    if len(rows) != count or any(len(workers) != 1 for workers, _, _ in rows):
        raise AssertionError(f"{len(rows)} tasks succeeded, not {count}")
    return drained(
        Run(worker=workers[0], started=started.timestamp(), finished=finished.timestamp())
        for workers, started, finished in rows
    )


def crowd(*, finished: int, future: int, running: int) -> dict[str, int]:
    """Fill an empty database: history, future tasks, other workers' tasks."""
    origin = _origin(noop)
    row = DBTaskResult.objects.get(pk=origin)
    row.claim("elsewhere")
    copy_row(TABLE, _key(origin), running, {"id": uuid_key()})
    row.set_successful(None)
    copy_row(TABLE, _key(origin), finished - 1, {"id": uuid_key()})
    later = _origin(noop.using(priority=HIGHEST, run_after=timezone.now() + FAR))
    copy_row(TABLE, _key(later), future - 1, {"id": uuid_key()})
    settle()
    return {"rows": DBTaskResult.objects.count()}


def queued(*, count: int, queue: str) -> dict[str, int]:
    """Fill with tasks of another queue."""
    origin = _origin(noop.using(queue_name=queue))
    copy_row(TABLE, _key(origin), count - 1, {"id": uuid_key()})
    settle()
    return {"rows": DBTaskResult.objects.count()}


def claims(*, count: int, queue: str) -> dict[str, Any]:
    """Time claims of one task each, as its worker for one queue makes them."""
    warm_up = max(3, count // 10)
    with transaction.atomic():
        for number in range(count + warm_up):
            noop.using(queue_name=queue).enqueue(number)
    settle()
    spent = []
    for _ in range(count + warm_up):
        begin = time.perf_counter()
        tasks = DBTaskResult.objects.ready().filter(backend_name="default")
        tasks = tasks.filter(queue_name__in=[queue])
        with exclusive_transaction(tasks.db):
            tasks.get_locked().claim("bench")
        spent.append(time.perf_counter() - begin)
    return {"claim": summary(spent[warm_up:])}


def _origin(task: Any) -> Any:
    return task.enqueue(0).id


def _key(origin: str) -> str:
    return origin if connection.vendor == "postgresql" else origin.replace("-", "")


def _enqueue(count: int) -> None:
    for number in range(count):
        noop.enqueue(number)


def _enqueue_in_atomic(count: int) -> None:
    for number in range(count):
        with transaction.atomic():
            noop.enqueue(number)


def _enqueue_together(count: int) -> None:
    with transaction.atomic():
        for number in range(count):
            noop.enqueue(number)
