"""What ``crash_points()`` plays is what a killed process leaves behind."""

from __future__ import annotations

import json
from contextlib import contextmanager
from itertools import count, groupby

import pytest
from django.db import connection, transaction

from django_durable_jobs.models import Job
from django_durable_jobs.testing.crashing import attempt
from django_durable_jobs.testing.life import Life
from tests._processes import python, succeeded

from . import dying


@contextmanager
def as_in_a_test_case():
    """The transaction that a TestCase has open around its test."""
    wrapper = transaction.atomic()
    wrapper._from_testcase = True
    with wrapper:
        yield
        transaction.set_rollback(True)


def played(handler: str) -> list[dying.Death]:
    """Play each death, and give what the tables hold before anybody recovers the job."""
    every: list[dying.Death] = []
    for number in count(1):
        dying.wipe()
        life = Life(number)
        attempt(Job.objects.submit(handler), life)
        if life.point is None:
            return every
        point = life.point
        every.append([dying.place(point.when, point.statement, point.sql), dying.tables()])
    raise AssertionError("unreachable")


def stages(every: list[dying.Death]) -> list[object]:
    """Give what the tables held, once for points in a row between which nothing changed."""
    return [tables for tables, _ in groupby(tables for _, tables in every)]


@pytest.mark.timeout(900)
@pytest.mark.django_db(transaction=True)
def test_a_played_death_leaves_what_a_killed_process_leaves(child_environment):
    killed = json.loads(succeeded(python("-m", "tests.testing.dying", env=child_environment)))
    # Nothing yet, alone, half, itself, the end; nothing yet, progress, the end.
    assert [len(stages(every)) for every in killed.values()] == [5, 3]
    for handler in dying.register():
        assert played(handler) == killed[handler]
        # There the BEGIN is a savepoint's, and some transactions take more statements.
        with as_in_a_test_case():
            assert stages(played(handler)) == stages(killed[handler])
    assert connection.in_atomic_block is False
