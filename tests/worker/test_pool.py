"""Handlers may hold every connection of Django's pool: the worker's own are not of it (4.3)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection

from tests.testapp.jobs import Gate as Gated
from tests.testapp.jobs import Line, holding, line

from .conftest import StartWorker
from .support import QUICK, Gate, attempts, fresh, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no pool"),
]

LEASE_SECONDS = 12


def test_a_pool_held_by_handlers_starves_no_loop(start_worker: StartWorker, gate: Gate) -> None:
    holders = [holding.submit(Gated(**gate.payload(name))) for name in "ab"]
    worker = start_worker(
        "--processes=0",
        "--threads=4",
        durable_jobs={**QUICK, "LEASE_SECONDS": LEASE_SECONDS},
        variables={"TEST_POOL": "2"},
    )
    for name in "ab":
        gate.begun(name)
    other = line.submit(Line(str(Path(gate.folder, "lines")), 1))
    until(lambda: fresh(other).is_terminal, "a claim and a finish beside the held connections")
    first = [fresh(job).lease_expires_at for job in holders]
    beyond = timedelta(seconds=LEASE_SECONDS / 2)  # by two renewals, a third of the lease each
    until(
        lambda: all(
            fresh(job).lease_expires_at > expiry + beyond
            for job, expiry in zip(holders, first, strict=True)
        ),
        "renewals beside the held connections",
    )
    assert [fresh(job).ownership for job in holders] == ["current", "current"]
    for name in "ab":
        gate.open(name)
    until(lambda: all(fresh(job).is_terminal for job in holders), "the handlers' ends")
    assert [[one.status for one in attempts(job)] for job in holders] == [["succeeded"]] * 2
    worker.send()
    assert worker.ends() == 0
    assert "Traceback" not in worker.output()
