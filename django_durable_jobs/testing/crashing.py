"""``crash_points()``: prove a handler idempotent by ending it at each of its statements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from django.core import mail
from django.core.management import call_command
from django.db import connections

from .. import states
from ..conf import settings
from ..dialects.base import refuse_open_transaction
from ..models import Job
from ..transactions import in_test_wrapper
from ..transitions.control import alias_of, operator_move
from .attempts import claim, expire_lease, run_within
from .draining import drain
from .life import Crashed, CrashPoint, Life


class CrashPointFailed(AssertionError):
    """What must hold did not, after the crash at ``point``; None: without any crash.

    What the check raised is its ``__cause__``.
    """

    def __init__(self, point: CrashPoint | None, error: Exception) -> None:
        self.point = point
        said = str(error).strip().partition("\n")[0]
        super().__init__(f"{_place(point)}: {type(error).__name__}: {said}")


def crash_points(
    stage: Callable[[], Job],
    check: Callable[[Job], object],
    *,
    ends: Collection[str] | None = None,
    reset: Callable[[], object] | None = None,
    max_points: int = 1000,
    using: str | None = None,
) -> list[CrashPoint]:
    """Run a job again and again, its process dying at each of its statements in turn.

    Each run begins anew: ``stage()`` makes the rows that the handler needs and gives the job.
    Its first attempt dies at one point: just before a statement, just after it, or after a
    commit; reads, the writes of ``ctx`` and of the job's end are statements too. Then the job
    is recovered and finished by the production code (and all else that is due), it must have
    ended as one of ``ends``, and ``check(job)`` must raise nothing. The first run has no crash;
    the last is the one that reaches no point any more. Gives the points, in order.

    In a ``TestCase`` each run is rolled back to how the tables were before. Else ``reset()``
    must bring that about; omitted, the databases that are used are emptied, as Django's
    ``TransactionTestCase`` does. ``ends`` is ``succeeded``, and after a crash ``interrupted``
    too for a job with ``retry_on_interrupt=False``, if omitted.

    Raises ``CrashPointFailed`` (an ``AssertionError``) that names the point,
    ``TransactionActive`` inside an ``atomic()`` of the test, and ``RuntimeError`` above
    ``max_points`` (CONTRACT 7.2).
    """
    alias = using or settings.DATABASE
    refuse_open_transaction(alias)
    points: list[CrashPoint] = []
    databases = {alias}
    for number in range(max_points + 2):  # 0 dies nowhere
        life = Life(number)
        with _told(life), _fresh_start(databases, reset):
            _run(life, stage, check, ends)
        databases |= life.databases
        if life.point is not None:
            points.append(life.point)
        elif number:
            return points
    raise RuntimeError(
        f"the attempt has more than {max_points} crash points: let it do less, or give max_points="
    )


@contextmanager
def _told(life: Life) -> Iterator[None]:
    """Say where it happened of what is raised as it is, pytest.fail() and a faulty stage() too."""
    try:
        yield
    except CrashPointFailed:
        raise
    except BaseException as error:
        error.add_note(_place(life.point))
        raise


@contextmanager
def _fresh_start(databases: Iterable[str], reset: Callable[[], object] | None) -> Iterator[None]:
    wrapped = [one for one in connections.all(initialized_only=True) if in_test_wrapper(one)]
    with ExitStack() as stack:
        for connection in wrapped:
            stack.enter_context(_rolled_back(connection))
        if reset is not None:
            reset()
        elif not wrapped:
            _flush(databases)
        yield


@contextmanager
def _rolled_back(connection: Any) -> Iterator[None]:
    """Undo in a TestCase what is done inside, and leave its transaction usable."""
    blocks, savepoints = len(connection.atomic_blocks), len(connection.savepoint_ids)
    callbacks = len(connection.run_on_commit)
    savepoint = connection.savepoint()
    try:
        yield
    finally:
        del connection.atomic_blocks[blocks:], connection.savepoint_ids[savepoints:]
        del connection.run_on_commit[callbacks:]
        connection.needs_rollback = False
        connection.savepoint_rollback(savepoint)
        connection.savepoint_commit(savepoint)


def _flush(databases: Iterable[str]) -> None:
    if not hasattr(mail, "outbox"):
        # setup_test_environment() makes it: what is emptied here is a test's database.
        raise RuntimeError("crash_points() empties the database, so it only runs in tests")
    for alias in databases:
        call_command("flush", database=alias, interactive=False, verbosity=0, reset_sequences=False)


def _run(
    life: Life,
    stage: Callable[[], Job],
    check: Callable[[Job], object],
    ends: Collection[str] | None,
) -> None:
    """Make the job, let its first attempt live, recover it, let it finish, and judge."""
    job = stage()
    if not isinstance(job, Job):
        raise TypeError(f"stage() must give the job, not {type(job).__name__}")
    attempt(job, life)
    _let_end(job)
    try:
        _judge(job, life.point, ends)
        check(job)
    except Exception as error:
        raise CrashPointFailed(life.point, error) from error


def attempt(job: Job, life: Life) -> None:
    """Claim the job, and let its handler and its end live as long as ``life`` lasts."""
    if job.status == states.SCHEDULED:
        _make_due(job)
    held = claim(job)
    with suppress(Crashed):
        run_within(held, life)


def _let_end(job: Job) -> None:
    """Recover the attempt if it died, and run the job to its end; nothing is waited for."""
    job.refresh_from_db()
    if job.status == states.RUNNING:
        expire_lease(job)
    drain(using=alias_of(job))
    job.refresh_from_db()
    while job.status == states.SCHEDULED:
        _make_due(job)
        drain(using=alias_of(job))
        job.refresh_from_db()


def _make_due(job: Job) -> None:
    """Let a job be due now that waits for its time or for the end of its backoff."""

    def make_due(alias: str, row: Job, now: int) -> None:
        Job.objects.using(alias).filter(pk=row.pk).update(run_at=now)

    operator_move(job, make_due)


def _judge(job: Job, point: CrashPoint | None, ends: Collection[str] | None) -> None:
    """Raise ``AssertionError`` for a job that has not ended as it should."""
    if ends is None:
        ends = {states.SUCCEEDED}
        if point is not None and not job.retry_on_interrupt:
            ends = {states.SUCCEEDED, states.INTERRUPTED}
    if job.status in ends:
        return
    why = " ".join(filter(None, (job.error_category, job.error_summary)))
    raise AssertionError(
        f"the job is {job.status}{why and f' ({why})'}, not {' or '.join(sorted(ends))};"
        f" executions used: {job.attempt_count} of {job.max_attempts + job.granted_attempts}"
        f"{', one by the crash' if point else ''}"
    )


def _place(point: CrashPoint | None) -> str:
    return "without a crash" if point is None else f"after a crash {point}"
