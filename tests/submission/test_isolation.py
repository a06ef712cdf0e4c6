"""Other isolation levels than READ COMMITTED (CONTRACT 1.4, 4.1; FAULTS 31)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from django_durable_jobs import IdentityConflict, doors
from django_durable_jobs.dialects import dialect_for
from django_durable_jobs.models import Job
from tests.racing import another_alias, held, racing, together
from tests.testapp.models import Business

from .handlers import order

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has one isolation level"),
]

LEVELS = {"repeatable read": "REPEATABLE_READ", "serializable": "SERIALIZABLE"}


@pytest.fixture(params=["DATABASE", "OPTIONS"])
def source(request: pytest.FixtureRequest) -> str:
    """Where the level is raised."""
    return str(request.param)


@pytest.fixture(params=LEVELS)
def raised(request: pytest.FixtureRequest, source: str) -> Iterator[str]:
    """Give an alias whose sessions begin at another level than READ COMMITTED."""
    level = request.param
    options = dict(connection.settings_dict["OPTIONS"])
    if source == "OPTIONS":
        from psycopg import IsolationLevel

        options["isolation_level"] = IsolationLevel[LEVELS[level]]
    with another_alias("raised", OPTIONS=options) as alias:
        if source != "OPTIONS":
            _raise_default(level)
        try:
            assert level_in_a_transaction(alias) == level
            yield alias
        finally:
            if source != "OPTIONS":
                _raise_default(None)


def _raise_default(level: str | None) -> None:
    name = connection.settings_dict["NAME"]
    setting = "default_transaction_isolation"
    change = f"RESET {setting}" if level is None else f"SET {setting} TO '{level}'"
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER DATABASE {connection.ops.quote_name(name)} {change}")


def level_in_a_transaction(alias: str) -> str:
    with transaction.atomic(using=alias):
        return show(alias)


def show(alias: str) -> str:
    with connections[alias].cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")
        return str(cursor.fetchone()[0])


def stage(one: Any, alias: str) -> Job:
    with transaction.atomic(using=alias):
        return Job.objects.stage(one, using=alias)


def is_serialization_failure(error: BaseException | None) -> bool:
    return (
        isinstance(error, OperationalError)
        and getattr(error.__cause__, "sqlstate", None) == "40001"
    )


# Transactions of our own --------------------------------------------------------------------------


def test_our_transactions_are_read_committed_and_the_session_stays_as_it_is(
    raised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = level_in_a_transaction(raised)
    dialect = dialect_for(raised)
    with dialect.own(raised):
        assert show(raised) == "read committed"
    assert dialect.run(raised, "SHOW transaction_isolation") == [("read committed",)]
    seen = []
    for name in ("_same_identity", "_same_key"):
        original = getattr(doors, name)

        def look(alias: str, *args: Any, original: Any = original) -> Any:
            seen.append(show(alias))
            return original(alias, *args)

        monkeypatch.setattr(doors, name, look)
    Job.objects.submit(order("a", dedupe_key="k"), using=raised)
    Job.objects.submit(order("b", dedupe_key="k"), using=raised)
    Job.objects.submit_many([order("b", dedupe_key="k")], using=raised)
    assert seen == ["read committed"] * 4
    assert level_in_a_transaction(raised) == level


def test_the_doors_with_transactions_of_their_own_answer_as_promised(raised: str) -> None:
    job = Job.objects.submit(order("a", dedupe_key="k"), using=raised)
    assert Job.objects.submit(order("a", dedupe_key="k"), using=raised) == job
    assert Job.objects.enqueue(order("b", 2, dedupe_key="k"), using=raised) == job
    many = Job.objects.submit_many([order("a", dedupe_key="k"), order("c")], using=raised)
    assert [one.newly_created for one in many] == [False, True]
    with pytest.raises(IdentityConflict):
        Job.objects.submit(order("a", 2), using=raised)
    with pytest.raises(IdentityConflict):
        Job.objects.submit_many([order("d"), order("a", 2)], using=raised)
    assert Job.objects.count() == 2


@pytest.mark.parametrize("many", [False, True])
def test_equal_submits_at_once_make_one_job(raised: str, many: bool) -> None:
    def submit(number: int) -> Job:
        if many:
            return Job.objects.submit_many([order("a")], using=raised)[0]
        return Job.objects.submit(order("a"), using=raised)

    jobs = [racer.result() for racer in together(submit, 10)]
    assert len({job.pk for job in jobs}) == 1
    assert sum(job.newly_created for job in jobs) == 1


@pytest.mark.parametrize("commit", [True, False])
def test_a_submit_that_lost_is_answered(raised: str, commit: bool) -> None:
    def submit() -> Job:
        return Job.objects.submit(order("a"), using=raised)

    with held(lambda: Job.objects.stage(order("a"), using=raised), alias=raised) as rival:
        with racing(submit, alias=raised) as [loser]:
            loser.wait_until_blocked()
            rival.commit() if commit else rival.rollback()
        assert loser.result().newly_created is not commit
    assert Job.objects.get() == loser.result()


only_database = pytest.mark.parametrize("source", ["DATABASE"], indirect=True)

# The caller's transactions ------------------------------------------------------------------------


def test_stage_answers_as_promised_where_nobody_races(raised: str) -> None:
    job = stage(order("a", dedupe_key="k"), raised)
    assert stage(order("a", dedupe_key="k"), raised) == job
    assert stage(order("b", dedupe_key="k"), raised) == job
    with pytest.raises(IdentityConflict), transaction.atomic(using=raised):
        Business.objects.using(raised).create(name="order")
        Job.objects.stage(order("a", 2), using=raised)
    assert Job.objects.get() == job and not Business.objects.exists()


RIVALS = {
    "equal": lambda: order("a"),
    "different": lambda: order("a", 2),
    "key": lambda: order("rival", 2, dedupe_key="k"),
}


@only_database
@pytest.mark.parametrize("rival_is", RIVALS)
@pytest.mark.parametrize("commit", [True, False])
def test_a_lost_race_in_the_callers_transaction_is_a_serialization_failure(
    raised: str, rival_is: str, commit: bool
) -> None:
    mine = order("a", dedupe_key="k" if rival_is == "key" else None)

    def lose() -> Job:
        with transaction.atomic(using=raised):
            Business.objects.using(raised).create(name="order")
            return Job.objects.stage(mine, using=raised)

    with held(lambda: Job.objects.stage(RIVALS[rival_is](), using=raised), alias=raised) as rival:
        with racing(lose, alias=raised) as [loser]:
            loser.wait_until_blocked()
            rival.commit() if commit else rival.rollback()
        if commit:
            assert is_serialization_failure(loser.error())
        else:
            assert loser.result().newly_created
    assert Business.objects.exists() is not commit
    assert Job.objects.count() == 1
    if commit and rival_is != "different":  # what the caller does then: begin again
        assert not stage(mine, raised).newly_created


@only_database
@pytest.mark.parametrize("rival_is", RIVALS)
def test_a_rival_after_the_snapshot_is_a_serialization_failure(raised: str, rival_is: str) -> None:
    mine = order("a", dedupe_key="k" if rival_is == "key" else None)
    with pytest.raises(OperationalError) as caught, transaction.atomic(using=raised):
        Business.objects.using(raised).create(name="order")  # takes the snapshot
        with racing(lambda: Job.objects.submit(RIVALS[rival_is]())) as [rival]:
            rival.result()
        Job.objects.stage(mine, using=raised)
    assert is_serialization_failure(caught.value)
    assert not Business.objects.exists() and Job.objects.count() == 1


@only_database
def test_an_existing_job_that_changed_after_the_snapshot_is_one_too(raised: str) -> None:
    job = Job.objects.submit(order("a"))
    with pytest.raises(OperationalError) as caught, transaction.atomic(using=raised):
        assert Business.objects.using(raised).count() == 0  # takes the snapshot
        with racing(lambda: Job.objects.get(pk=job.pk).request_cancel()) as [worker]:
            worker.result()
        Job.objects.stage(order("a"), using=raised)
    assert is_serialization_failure(caught.value)
    assert stage(order("a"), raised) == job
