"""Handlers that the tests register; found by the package's autodiscovery.

Those that several processes run talk to the test through files: a handler says that it has
begun, and waits until it may go on (``tests.worker.support.Gate``).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from django.db import connection, transaction
from django.db.models import F

from django_durable_jobs import FinishEvent, JobContext, job, schedule


@dataclass
class Line:
    """A file that takes one line for each execution."""

    file: str
    number: int


@dataclass
class Gate:
    folder: str
    name: str

    def begin(self, ctx: JobContext) -> None:
        """Say that this attempt has begun; whoever sees the file can read all of it."""
        begun = Path(self.folder, f"{self.name}.{ctx.attempt}.begun")
        unfinished = begun.with_suffix(".writing")
        unfinished.write_text(f"{os.getpid()} {ctx.token}")
        unfinished.rename(begun)

    def is_open(self) -> bool:
        return Path(self.folder, f"{self.name}.go").exists()


@job("testapp.nothing")
def nothing(ctx: JobContext) -> None: ...


@job("testapp.nothing_async")
async def nothing_async(ctx: JobContext) -> None: ...


@job("testapp.line")
def line(ctx: JobContext, payload: Line) -> None:
    # One short write to a file opened for appending is never torn.
    with open(payload.file, "ab", buffering=0) as file:
        file.write(b"%d\n" % payload.number)


@job("testapp.gated")
def gated(ctx: JobContext, payload: Gate) -> dict[str, int]:
    """Wait for the gate, deaf to everything else."""
    payload.begin(ctx)
    while not payload.is_open():
        time.sleep(0.01)
    return {"attempt": ctx.attempt}


@job("testapp.obedient")
def obedient(ctx: JobContext, payload: Gate) -> dict[str, int]:
    """Wait for the gate and look whether it should stop."""
    payload.begin(ctx)
    while not payload.is_open():
        ctx.check()
        time.sleep(0.01)
    return {"attempt": ctx.attempt}


@job("testapp.uninterruptible", retry_on_interrupt=False)
def uninterruptible(ctx: JobContext, payload: Gate) -> None:
    payload.begin(ctx)
    while not payload.is_open():
        ctx.check()
        time.sleep(0.01)


@job("testapp.swallowing")
def swallowing(ctx: JobContext, payload: Gate) -> str:
    """Swallow every ``Exception``, as careless code does."""
    payload.begin(ctx)
    while True:
        try:
            ctx.check()
            time.sleep(0.01)
        except Exception:  # noqa: BLE001, S112
            continue


@job("testapp.asleep")
async def asleep(ctx: JobContext, payload: Gate) -> None:
    """Wait for the gate on the event loop."""
    payload.begin(ctx)
    while not payload.is_open():
        ctx.check()
        await asyncio.sleep(0.01)


@job("testapp.suicidal", max_attempts=2)
def suicidal(ctx: JobContext, payload: Gate) -> None:
    """End the whole process."""
    payload.begin(ctx)
    os._exit(9)


@job("testapp.hanging", max_attempts=100)
def hanging(ctx: JobContext, payload: Gate) -> None:
    """Stop the whole process, in the first attempt."""
    payload.begin(ctx)
    if ctx.attempt == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        # Any thread may take the signal: this one may run on for a moment before it stops.
        threading.Event().wait()


def fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads, and rightly so.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@job("testapp.forking")
def forking(ctx: JobContext, payload: Gate) -> dict[str, int]:
    """Fork; the child returns from the handler as the parent does."""
    payload.begin(ctx)
    child = fork()
    if child == 0:
        return {"child": -1}
    return {"child": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}


@job("testapp.holding")
def holding(ctx: JobContext, payload: Gate) -> None:
    """Wait for the gate inside a transaction."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        gated(ctx, payload)


@dataclass
class Work:
    """``seconds`` to take, whether to look at ``ctx.check()`` meanwhile, how often to fail."""

    effects: str
    seconds: float
    obedient: bool
    failures: float

    def note(self, ctx: JobContext, what: str) -> None:
        """Say in a file, past every database, what this attempt does now."""
        line = {"what": what, "job": ctx.job_id, "token": ctx.token, "at": time.monotonic()}
        with open(self.effects, "ab", buffering=0) as file:
            file.write(f"{json.dumps(line)}\n".encode())


@job("testapp.work", max_attempts=30)
def work(ctx: JobContext, payload: Work) -> str:
    payload.note(ctx, "begin")
    end = time.monotonic() + payload.seconds
    while time.monotonic() < end:
        if payload.obedient:
            ctx.check()
        time.sleep(0.01)
    payload.note(ctx, "end")
    # One draw for each attempt, whichever process runs it.
    if random.Random(ctx.token).random() < payload.failures:
        raise ValueError("as it was told")
    return ctx.token


@job("testapp.fencing")
def fencing(ctx: JobContext, payload: Gate) -> None:
    """Wait for the gate in a transaction that holds the job's own row, and what else it needs."""
    with transaction.atomic():
        ctx.fence()
        gated(ctx, payload)


@dataclass
class Keyed(Work):
    key: str | None = None


# How many the code of a process allows: old and new code may differ.
_AT_ONCE = int(os.environ.get("TEST_LIMIT", "2"))


@job(
    "testapp.keyed",
    max_attempts=30,
    concurrency=_AT_ONCE,
    concurrency_key=lambda payload: payload.key,
)
def keyed(ctx: JobContext, payload: Keyed) -> str:
    return work(ctx, payload)


@job("testapp.scoped", max_attempts=30, concurrency=1, concurrency_key="scope")
def scoped(ctx: JobContext, payload: Work) -> str:
    return work(ctx, payload)


@job("testapp.alone", max_attempts=30, concurrency=1)
def alone(ctx: JobContext, payload: Gate) -> dict[str, int]:
    return obedient(ctx, payload)


def add(account: str, amount: int) -> None:
    from .models import Business

    Business.objects.filter(pk=account).update(value=F("value") + amount)


@job("testapp.deposit", max_attempts=1000)
def deposit(ctx: JobContext, amount: int) -> None:
    """Add to the account that the scope names."""
    with transaction.atomic():
        add(ctx.scope, amount)
        time.sleep(0.002)  # it may well be killed here
        ctx.complete(amount)


def deposit_result(event: FinishEvent) -> None:
    if event.status == "succeeded":
        add(event.scope, event.result)
        time.sleep(0.002)


@job("testapp.deposit_at_the_end", max_attempts=1000, on_finish=deposit_result)
def deposit_at_the_end(ctx: JobContext, amount: int) -> int:
    return amount


@job("testapp.gated_deposit", on_finish=deposit_result)
def gated_deposit(ctx: JobContext, payload: Gate) -> int:
    gated(ctx, payload)
    return 1


# What a process that a test starts declares: the arguments of ``schedule()``, as JSON.
for _declared in json.loads(os.environ.get("TEST_SCHEDULES", "[]")):
    schedule(**_declared)
