"""Finding jobs by indexes alone: by id, by job id, by handler, by time of creation.

No index of ``Job`` exists for the admin's sake: each would cost every claim and every finish.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Max

from ..dialects import dialect_for
from ..dialects.base import JOBS
from ..instants import from_microseconds, to_microseconds

if TYPE_CHECKING:
    from datetime import datetime

    from django.db.models import QuerySet

ID_MAX = 2**63 - 1
# A handler is looked for among so many of the newest rows.
HANDLER_WINDOW = 100_000
# A job id is looked for in so many scopes, one look-up in the identity's index for each.
SCOPES = 10_000
# How many jobs of one job id (in different scopes) a search gives.
FOUND = 1000
# How many neighbouring rows judge one step of the search for a creation instant.
SAMPLE = 100


def search(jobs: QuerySet[Any], alias: str, term: str) -> QuerySet[Any]:
    """Narrow to the row or job id that ``term`` is, else to handlers that begin with it."""
    exact = _with_job_id(alias, term)
    if term.isascii() and term.isdigit() and int(term) <= ID_MAX:
        exact += jobs.filter(pk=int(term)).order_by().values_list("pk", flat=True)
    if exact:
        return jobs.filter(pk__in=exact)
    newest = jobs.model.objects.using(alias).aggregate(newest=Max("pk"))["newest"] or 0
    return jobs.filter(pk__gt=newest - HANDLER_WINDOW, handler__startswith=term)


def _with_job_id(alias: str, term: str) -> list[int]:
    """Look the job id up scope by scope: the identity's index is led by the scope's hash.

    The scopes themselves are found by steps through that index, never by reading all rows.
    """
    sql = (
        "WITH RECURSIVE scopes(hash, number) AS ("
        f" SELECT (SELECT min(scope_hash) FROM {JOBS}), 1 UNION ALL"
        f" SELECT (SELECT min(j.scope_hash) FROM {JOBS} j WHERE j.scope_hash > s.hash),"
        f" s.number + 1 FROM scopes s WHERE s.hash IS NOT NULL AND s.number < {SCOPES})"
        f" SELECT found.id FROM scopes s CROSS JOIN {JOBS} found"
        " WHERE found.scope_hash = s.hash AND found.job_id = %s"
        f" LIMIT {FOUND}"
    )
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, [term])
        return [row[0] for row in cursor.fetchall()]


def created_within(jobs: QuerySet[Any], alias: str, span: timedelta) -> QuerySet[Any]:
    """Narrow to jobs created at most ``span`` ago.

    Ids are drawn in the order of creation, so the first id of the span is found by halving
    the range of ids; then the primary key's index serves. Single rows out of that order do
    no harm, a mass of imported ones (hundreds side by side) may hide what is older.
    """
    since = now(alias) - span
    return jobs.filter(pk__gt=_last_id_before(alias, since), created_at__gte=since)


def _last_id_before(alias: str, since: datetime) -> int:
    micros = to_microseconds(since)
    middle = "(b.low + b.high) / 2"
    recent = (
        f"(SELECT max(sample.created_at) >= {micros} FROM (SELECT j.created_at FROM {JOBS} j"
        f" WHERE j.id > {middle} ORDER BY j.id LIMIT {SAMPLE}) AS sample)"
    )
    sql = (
        "WITH RECURSIVE b(low, high) AS ("
        f" SELECT (SELECT min(id) - 1 FROM {JOBS}), (SELECT max(id) FROM {JOBS}) UNION ALL"
        f" SELECT CASE WHEN {recent} THEN b.low ELSE {middle} END,"
        f" CASE WHEN {recent} THEN {middle} ELSE b.high END"
        f" FROM b WHERE b.high - b.low > {SAMPLE})"
        " SELECT max(low) FROM b"
    )
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return int(cursor.fetchone()[0] or 0)


def now(alias: str) -> datetime:
    """Read the one clock that decides what is due (CONTRACT 0)."""
    return from_microseconds(dialect_for(alias).instant(alias))
