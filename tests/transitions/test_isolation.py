"""The moves on sessions that begin above READ COMMITTED (CONTRACT 3.8, 4.1; FAULTS 31).

The level is raised in the alias or in the database; each race runs on connections of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test import override_settings

from django_durable_jobs import states
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.exceptions import InvalidTransition, LeaseLost
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.transitions import (
    blocking,
    claims,
    completion,
    leases,
    maintenance,
    outcomes,
    recovery,
    workers,
)
from django_durable_jobs.transitions._fence import standings
from django_durable_jobs.transitions.claims import ClaimedJob
from tests.races.paused import paused
from tests.racing import PATIENT, another_alias, barrier, held, racing, together

from .live import (
    LANE,
    check_rows,
    claim,
    claimed,
    done,
    expired,
    holders,
    lease_of,
    lock,
    queued,
    sleep_past,
)

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has one isolation level"),
]
# Where the level is raised, and to what: the alias's own options, or the database's default.
RAISED = [("OPTIONS", "repeatable read"), ("DATABASE", "serializable")]


@pytest.fixture(params=RAISED, ids=" ".join)
def raised(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give an alias whose sessions begin at a higher level.

    At the end of the test none of our transactions may have been tried again: that would hide
    that they did not run at READ COMMITTED.
    """
    source, level = request.param
    options = dict(connection.settings_dict["OPTIONS"])
    if source == "OPTIONS":
        from psycopg import IsolationLevel

        options["isolation_level"] = IsolationLevel[level.upper().replace(" ", "_")]
    with (
        another_alias("raised", OPTIONS=options) as alias,
        override_settings(DURABLE_JOBS=PATIENT),
        no_conflicts(),
    ):
        if source == "DATABASE":
            _raise_default(f"SET default_transaction_isolation TO '{level}'")
        try:
            with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
                cursor.execute("SHOW transaction_isolation")
                assert cursor.fetchone() == (level,)
            yield alias
        finally:
            if source == "DATABASE":
                _raise_default("RESET default_transaction_isolation")
    check_rows()


@contextmanager
def no_conflicts() -> Iterator[None]:
    conflicts: list[BaseException] = []
    dialect = dialect_for("default")
    original = dialect.is_conflict

    def is_conflict(error: BaseException) -> bool:
        if original(error):
            conflicts.append(error)
        return original(error)

    with patch.object(dialect, "is_conflict", is_conflict):
        yield
    assert not conflicts


def _raise_default(change: str) -> None:
    name = connection.ops.quote_name(connection.settings_dict["NAME"])
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER DATABASE {name} {change}")


def job(alias: str) -> Job:
    return Job.objects.using(alias).get()


def by_id(alias: str, pk: int) -> Job:
    return Job.objects.using(alias).get(pk=pk)


def test_every_move_works_where_nobody_races(raised: str):
    queued(3)
    one, two, three = claim(3, alias=raised)
    assert leases.renew(raised, holders([one, two]), lease_seconds=60) == {one.token, two.token}
    outcomes.record_progress(raised, one.id, one.token, 0.5, "half")
    outcomes.record_checkpoint(raised, one.id, one.token, "1")
    with transaction.atomic(using=raised):
        outcomes.record_progress(raised, one.id, one.token, 0.75, "inside")
    assert outcomes.finish(raised, [done(one)]).written == {one.id: "succeeded"}
    assert by_id(raised, two.id).request_cancel() == "requested"
    assert leases.cancel_requests(raised, holders([two])) == {two.token}
    assert outcomes.finish(raised, [done(two)]).written == {two.id: "cancelled"}
    assert by_id(raised, two.id).retry().status == "queued"
    assert by_id(raised, three.id).recover(three.token) == "queued"
    assert blocking.block_lane(raised, LANE, states.UNKNOWN_HANDLER, patience=0) == 2
    assert by_id(raised, two.id).release() == "queued"
    assert blocking.release_lane(raised, LANE) == 1
    again = claim(1, alias=raised)
    assert claims.give_back(raised, holders(again)) == {again[0].id: "queued"}
    again = claim(1, alias=raised)
    rows = [(again[0].id, again[0].token, states.CORRUPT_PAYLOAD)]
    assert claims.block_claimed(raised, rows) == {again[0].id: "blocked"}
    assert maintenance.promote_due(raised) == maintenance.exhaust(raised) == 0
    assert workers.beat(raised, register(raised))


def register(alias: str) -> int:
    return workers.register(alias, name="w", queues=None, excluded_queues=[], capabilities=[])


def test_claimers_at_once_take_each_job_once(raised: str):
    pks = {one.pk for one in queued(60)}

    each_has_claimed = barrier(4)

    def claim_all(number: int) -> list[int]:
        taken = [one.id for one in claim(3, alias=raised)]
        each_has_claimed.wait()
        while Job.objects.using(raised).filter(status="queued").exists():
            taken += [one.id for one in claim(3, alias=raised)]
        return taken

    taken = [racer.result() for racer in together(claim_all, 4)]
    assert sorted(pk for each in taken for pk in each) == sorted(pks)
    assert sum(map(bool, taken)) > 1


def test_passes_at_once_move_each_job_once(raised: str):
    expired(60)
    queued(60, status="scheduled")
    recovered = together(lambda number: recovery.recover_expired(raised), 3)
    promoted = together(lambda number: maintenance.promote_due(raised), 3)
    assert sum(racer.result() for racer in recovered) + recovery.recover_expired(raised) == 60
    assert sum(racer.result() for racer in promoted) + maintenance.promote_due(raised) == 60


Race = tuple[Callable[[str, Any], Any], Callable[[str, Any], Any], Callable[[Any], bool]]


def recovers(alias: str, one: Any) -> str:
    return by_id(alias, one.id).recover(one.token)


def cancels(alias: str, one: Any) -> str:
    return by_id(alias, one.id).request_cancel()


def finishes(alias: str, one: Any) -> Any:
    return outcomes.finish(alias, [done(one)], wait=True).written.get(one.id)


def checkpoints(alias: str, one: Any) -> Any:
    try:
        outcomes.record_checkpoint(alias, one.id, one.token, "1")
    except LeaseLost as error:
        return error
    return None


def refused(alias: str, one: Any) -> Any:
    try:
        return recovers(alias, one)
    except InvalidTransition as error:
        return error


WAITING: dict[str, Race] = {
    "cancel, finish": (cancels, finishes, lambda answer: answer == "cancelled"),
    "finish, cancel": (finishes, cancels, lambda answer: answer == "unchanged"),
    "recover, finish": (recovers, finishes, lambda answer: answer is None),
    "recover, checkpoint": (recovers, checkpoints, lambda answer: type(answer) is LeaseLost),
    "finish, recover": (finishes, refused, lambda answer: type(answer) is InvalidTransition),
    "cancel, cancel": (cancels, cancels, lambda answer: answer == "requested"),
}


@pytest.mark.parametrize("race", WAITING)
def test_the_second_waits_and_judges_what_the_first_committed(raised: str, race: str):
    """At the raised level it would be told of a serialization failure instead."""
    first, second, is_right = WAITING[race]
    [one] = claimed()
    with paused(lambda: first(raised, one), alias=raised) as standing:
        with racing(lambda: second(raised, one), alias=raised) as [waiting]:
            waiting.wait_until_blocked()
            standing.go_on()
        assert is_right(waiting.result()), waiting.result()


def test_a_renewal_and_a_pass_leave_what_another_holds(raised: str):
    ones = expired(2)
    with paused(lambda: recovery.recover_expired(raised), alias=raised) as standing:
        assert recovery.recover_expired(raised) == 0
        assert leases.renew(raised, holders(ones), lease_seconds=60) == set()
        assert claim(5, alias=raised) == []
        assert standing.go_on() == 2


def test_a_lease_that_ends_during_the_wait_is_lost(raised: str):
    [one] = claimed(lease=3)
    end = lease_of(one.id)
    with held(lambda: lock(one.id, raised), alias=raised) as stranger:
        with racing(lambda: checkpoints(raised, one), alias=raised) as [writer]:
            writer.wait_until_blocked()
            sleep_past(end)
            stranger.commit()
        assert isinstance(writer.result(), LeaseLost)


def test_retries_at_once_queue_once(raised: str):
    [one] = claimed()
    outcomes.finish("default", [done(one, status="failed", final_status="failed")])

    def retry(number: int) -> bool:
        try:
            job(raised).retry()
        except InvalidTransition:
            return False
        return True

    assert sum(racer.result() for racer in together(retry, 5)) == 1


# In a caller's or a handler's transaction only the documented failure -----------------------------


WRITES: dict[str, Callable[[str, ClaimedJob], object]] = {
    "cancel": cancels,
    "progress": lambda alias, one: outcomes.record_progress(alias, one.id, one.token, 0.5, ""),
    "checkpoint": lambda alias, one: outcomes.record_checkpoint(alias, one.id, one.token, "1"),
    "fence": lambda alias, one: completion.fence(alias, one.id, one.token),
    "complete": lambda alias, one: completion.complete(alias, one.id, one.token, "1"),
}


@pytest.mark.parametrize("move", WRITES)
def test_in_the_callers_transaction_a_change_after_his_snapshot_is_a_failure_to_serialize(
    raised: str, move: str
):
    [one] = claimed()
    with pytest.raises(OperationalError) as caught, transaction.atomic(using=raised):
        Job.objects.using(raised).count()  # takes the snapshot
        assert leases.renew("default", holders([one]), lease_seconds=60) == {one.token}
        WRITES[move](raised, one)
    assert caught.value.__cause__.sqlstate == "40001"  # type: ignore[union-attr]
    attempt = JobAttempt.objects.get()
    assert (attempt.status, attempt.progress) == ("running", 0)
    assert connections[raised].get_autocommit()


def test_a_fence_that_comes_first_holds_renewals_off_until_the_completion(raised: str):
    [one] = claimed()
    with transaction.atomic(using=raised):
        completion.fence(raised, one.id, one.token)
        assert leases.renew("default", holders([one]), lease_seconds=60) == set()
        assert standings("default", holders([one]))[one.token].owns, "busy, not lost"
        completion.complete(raised, one.id, one.token, "1")
    assert Job.objects.get().status == "succeeded"
