"""The manager and queryset of ``Job``: the doors and the reads of CONTRACT 1 and 3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from django.db import models

from .conf import settings
from .pages import SCOPED, Page, checked_text, read_page

if TYPE_CHECKING:
    from .handlers import Handler
    from .models import Job
    from .submission import JobSubmission


class JobQuerySet(models.QuerySet["Job"]):
    """Jobs; ``in_scope`` narrows to one scope and never crosses it (CONTRACT 1.6)."""

    def in_scope(self, scope: str) -> JobQuerySet:
        from .submission import scope_digest

        found = self.filter(scope_hash=scope_digest(scope))
        return found.filter(SCOPED) if scope else found

    def page(
        self,
        *,
        scope: str | None = None,
        handler: str | Handler[..., Any] | None = None,
        status: str | None = None,
        after: str | None = None,
        limit: int = 25,
        max_bytes: int = 262_144,
    ) -> Page:
        """Read jobs page by page, the newest (the highest id) first (CONTRACT 3.11).

        Gives ``jobs``, at most ``limit`` (1 to 100) and as many as hold at most ``max_bytes``
        (1 to 1,048,576) together, and ``next_cursor``: the ``after`` of the next page, ``None``
        at the end. Bytes are those of the long columns that are read: payload, checkpoint,
        result, error summary and traceback, but for what ``defer()`` leaves out.

        One page looks through at most 100,000 ids for a handler, or for a status other than
        ``running``, ``blocked``, ``failed``, ``cancelled`` and ``interrupted``; so it may hold
        few jobs or none and have a ``next_cursor`` all the same.

        ``handler`` is a name, or the decorated object for its name: jobs of all its versions.

        Raises ``ValueError`` for values out of range, for a slice or ``values()``, and where not
        even one job fits; ``InvalidCursor`` for an ``after`` that is no cursor of this query.
        """
        jobs = self if scope is None else self.in_scope(checked_text("scope", scope, 0, 200))
        return read_page(
            jobs, handler=handler, status=status, after=after, limit=limit, max_bytes=max_bytes
        )


class DurableManager(models.Manager[Any]):
    """Reads ``DURABLE_JOBS["DATABASE"]`` unless told otherwise (CONTRACT 7.5).

    What belongs to a job stays on the database that the job was read from.
    """

    def get_queryset(self) -> models.QuerySet[Any]:
        instance = getattr(self, "instance", None)
        alias = self._db or (settings.DATABASE if instance is None else instance._state.db)
        return super().get_queryset().using(alias)


class JobManager(DurableManager.from_queryset(JobQuerySet)):  # type: ignore[misc]
    """``Job.objects``."""

    def stage(
        self, handler: Any, payload: Any = None, *, using: str | None = None, **options: Any
    ) -> Job:
        """Insert inside the caller's ``atomic()``; exists if and only if it commits (1.4)."""
        from .doors import stage

        return stage(handler, payload, using=using or self._db, **options)

    def submit(
        self, handler: Any, payload: Any = None, *, using: str | None = None, **options: Any
    ) -> Job:
        """Insert in a short transaction of its own; refuses inside an open one (1.4)."""
        from .doors import submit

        return submit(handler, payload, using=using or self._db, **options)

    def enqueue(
        self, handler: Any, payload: Any = None, *, using: str | None = None, **options: Any
    ) -> Job:
        """Join an open transaction as ``stage``, else make one as ``submit`` (1.4)."""
        from .doors import enqueue

        return enqueue(handler, payload, using=using or self._db, **options)

    def stage_many(
        self, submissions: Iterable[JobSubmission], *, using: str | None = None
    ) -> list[Job]:
        """Stage many in few round trips, in order; one conflict stores nothing (1.4)."""
        from .doors import stage_many

        return stage_many(submissions, using=using or self._db)

    def submit_many(
        self, submissions: Iterable[JobSubmission], *, using: str | None = None
    ) -> list[Job]:
        """Submit many in one transaction of its own, in order (1.4)."""
        from .doors import submit_many

        return submit_many(submissions, using=using or self._db)

    def enqueue_many(
        self, submissions: Iterable[JobSubmission], *, using: str | None = None
    ) -> list[Job]:
        """Enqueue many: as ``stage_many`` inside a transaction, else ``submit_many`` (1.4)."""
        from .doors import enqueue_many

        return enqueue_many(submissions, using=using or self._db)

    async def asubmit(
        self, handler: Any, payload: Any = None, *, using: str | None = None, **options: Any
    ) -> Job:
        """Async twin of ``submit``."""
        from .doors import asubmit

        return await asubmit(handler, payload, using=using or self._db, **options)

    async def aenqueue(
        self, handler: Any, payload: Any = None, *, using: str | None = None, **options: Any
    ) -> Job:
        """Async twin of ``enqueue``."""
        from .doors import aenqueue

        return await aenqueue(handler, payload, using=using or self._db, **options)

    async def asubmit_many(
        self, submissions: Iterable[JobSubmission], *, using: str | None = None
    ) -> list[Job]:
        """Async twin of ``submit_many``."""
        from .doors import asubmit_many

        return await asubmit_many(submissions, using=using or self._db)

    async def aenqueue_many(
        self, submissions: Iterable[JobSubmission], *, using: str | None = None
    ) -> list[Job]:
        """Async twin of ``enqueue_many``."""
        from .doors import aenqueue_many

        return await aenqueue_many(submissions, using=using or self._db)

    def execution_status(self, token: str) -> str:
        """``"running"``, ``"cancel_requested"`` or ``"ended"`` for any text (3.10)."""
        from .transitions.leases import execution_status

        return execution_status(token, using=self._db)
