"""The handlers of the soak. Each says in a file, past every database, when it begins and ends."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass

from django_durable_jobs import JobContext, job


@dataclass
class Work:
    """``seconds`` to take, whether to look at ``ctx.check()`` meanwhile, how often to fail."""

    effects: str
    seconds: float
    obedient: bool
    failures: float


@job("soak.work", max_attempts=30)
def work(ctx: JobContext, payload: Work) -> str:
    _note(payload, ctx, "begin")
    end = time.monotonic() + payload.seconds
    while time.monotonic() < end:
        if payload.obedient:
            ctx.check()
        time.sleep(0.01)
    # One draw for each attempt, whichever process runs it.
    if random.Random(ctx.token).random() < payload.failures:  # noqa: S311
        _note(payload, ctx, "end")
        raise ValueError("as it was told")
    _note(payload, ctx, "end")
    return ctx.token


def _note(payload: Work, ctx: JobContext, what: str) -> None:
    line = {"what": what, "job": ctx.job_id, "token": ctx.token, "at": time.monotonic()}
    file = os.open(payload.effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{json.dumps(line)}\n".encode())
    finally:
        os.close(file)
