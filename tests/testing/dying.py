"""A handler whose process is killed at each of its statements in turn.

    python -m tests.testing.dying

Prints a JSON object: by handler, for each kill where it was and what the tables held afterwards.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import suppress
from itertools import count
from typing import Any

import django
from django.db import Error

Death = list[Any]


def register() -> list[str]:
    """Declare handlers with each kind of statement: alone, in transactions, nested, fenced."""
    from django.db import transaction

    from django_durable_jobs import job
    from tests.testapp.models import Business

    def finished(event) -> None:
        Business.objects.create(name="finished", value=event.attempt)

    @job("dying.completing", max_attempts=2)
    def completing(ctx) -> None:
        Business.objects.create(name="alone", value=ctx.attempt)
        with transaction.atomic():
            Business.objects.create(name="half", value=ctx.attempt)
            ctx.checkpoint("half")
        # As Django opens one for itself; a TestCase has nothing of it.
        with transaction.atomic(savepoint=False):
            Business.objects.create(name="itself", value=ctx.attempt)
        with transaction.atomic():
            with transaction.atomic():
                Business.objects.create(name="nested", value=ctx.attempt)
            ctx.complete("done")

    @job("dying.returning", max_attempts=2, on_finish=finished)
    def returning(ctx) -> str:
        ctx.progress(0.5)
        return "done"

    return [completing.name, returning.name]


def tables() -> dict[str, Any]:
    """Give what must be the same after a death, however it came about."""
    from django_durable_jobs.models import Job, JobAttempt
    from tests.testapp.models import Business

    columns = ("status", "attempt_count", "checkpoint", "result", "progress", "error_category")
    return {
        "business": [
            list(row) for row in Business.objects.order_by("pk").values_list("name", "value")
        ],
        "jobs": [list(row) for row in Job.objects.values_list(*columns)],
        "leases": Job.objects.filter(lease_token__isnull=False).count(),
        "attempts": [list(row) for row in JobAttempt.objects.values_list("status", "outcome")],
    }


def place(when: str, statement: int, sql: str) -> list[Any]:
    """Name a point, whatever the time and the number of its savepoint."""
    return [when, statement, re.sub(r"\bs\d+_x\d+\b|\d{10,}", "*", " ".join(sql.split()))[:150]]


def wipe() -> None:
    from django_durable_jobs.models import Job
    from tests.testapp.models import Business

    Job.objects.all().delete()
    Business.objects.all().delete()


class KillAt:
    """Kills this process at the n-th point of what is done within."""

    def __init__(self, number: int, pipe: int) -> None:
        self.number, self.pipe = number, pipe
        self.points = self.statements = 0

    def __enter__(self) -> None:
        from django.db import connection

        self._commit = connection._commit
        connection._commit = lambda: self.sent("COMMIT", self._commit)
        connection.execute_wrappers.insert(0, self.execute)

    def __exit__(self, *_: object) -> None:
        from django.db import connection

        connection.execute_wrappers.clear()
        connection._commit = self._commit

    def execute(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        def send() -> Any:
            answer = execute(sql, params, many, context)
            if self.points + 1 == self.number:
                # SQLite has done what RETURNING tells of only once that is fetched.
                with suppress(Error):
                    context["cursor"].fetchall()
            return answer

        return self.sent(sql, send)

    def sent(self, sql: str, send: Any) -> Any:
        self.statements += 1
        statement = self.statements
        self.reach("before", statement, sql)
        answer = send()
        self.reach("after", statement, sql)
        return answer

    def reach(self, when: str, statement: int, sql: str) -> None:
        self.points += 1
        if self.points == self.number:
            os.write(self.pipe, json.dumps(place(when, statement, sql)).encode())
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at(number: int, handler: str) -> Death | None:
    """Let a process of its own work on a new job and die; None if it lived to the end."""
    from django.db import connections

    from django_durable_jobs.models import Job

    wipe()
    job = Job.objects.submit(handler)
    connections.close_all()
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        live(job, KillAt(number, writing))
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code == (-signal.SIGKILL if said else 0), code
    return [json.loads(said), tables()] if said else None


def live(job: Any, death: KillAt) -> None:
    from django_durable_jobs.testing.attempts import claim, run_within

    try:
        held = claim(job)
        run_within(held, death)
        os._exit(0)
    finally:
        os._exit(1)


def deaths(handler: str) -> list[Death]:
    every = []
    for number in count(1):
        death = kill_at(number, handler)
        if death is None:
            return every
        every.append(death)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    django.setup()
    json.dump({handler: deaths(handler) for handler in register()}, sys.stdout)
