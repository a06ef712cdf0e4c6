"""Pages of jobs, the newest first: bounded in rows, in bytes and in what is looked at (3.11).

Scopes and the rarer statuses have an index in the order of a page. For the rest there is none:
it would be written with each claim and each end. So a page looks for it among ``WALKED`` ids,
and its cursor goes on below them, whether or not they held enough for the page.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

from django.core.exceptions import EmptyResultSet
from django.db.models import F, Max, Q, TextField
from django.db.models.query import ModelIterable

from . import states
from .dialects import dialect_for
from .dialects.base import JOBS
from .exceptions import InvalidCursor, InvalidSubmission
from .fields import columns_of
from .handlers import Handler
from .payloads import check_text
from .submission import scope_digest

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from .models import Job

LIMIT_MAX = 100
BYTES_MAX = 1024 * 1024
# How many ids a page looks through for what no index finds in its order.
WALKED = 100_000

# The conditions of the indexes that are in the order of a page, to be said in a query as well:
# SQLite concludes nothing, and so no other query takes these indexes there.
SCOPED = ~Q(scope_hash=scope_digest(""))
NEEDS_ATTENTION = reduce(and_, [~Q(status=one) for one in states.ORDINARY])

# A page goes on below an id; a digest of it and of what was asked for follows.
_CURSOR = struct.Struct(">q16s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some jobs, the newest first, and where the next page begins: ``None`` at the end."""

    jobs: list[Job]
    next_cursor: str | None


def read_page(
    jobs: QuerySet[Any],
    *,
    handler: str | Handler[..., Any] | None = None,
    queue: str | None = None,
    status: str | None = None,
    after: str | None = None,
    limit: int = 25,
    max_bytes: int = 262_144,
) -> Page:
    """Read a page of a queryset, whose ``only()`` and ``defer()`` say which columns are read.

    ``Job.objects.page()`` tells the rest. At most three queries make a page.
    """
    _check_whole("limit", limit, LIMIT_MAX)
    _check_whole("max_bytes", max_bytes, BYTES_MAX)
    _check_shape(jobs)
    name = handler.name if isinstance(handler, Handler) else handler
    looked_for = _conditions(handler=name, queue=queue, status=status)
    walk = jobs.order_by("-id")
    if status == states.RUNNING:
        # As few as there are slots, so all are read and sorted: their index is in another order.
        # By an expression, since SQLite would rather walk the primary key.
        walk = jobs.alias(back=-F("id")).order_by("back").filter(**looked_for)
        looked_for = {}
    elif status is not None and status not in states.ORDINARY:
        walk = walk.filter(NEEDS_ATTENTION, status=looked_for.pop("status"))
    # A reverse() would turn the page's own order round.
    walk.query.standard_ordering = True
    try:
        asked = _asked(walk.filter(**looked_for))
    except EmptyResultSet:
        return Page(jobs=[], next_cursor=None)
    below = walk if after is None else _below(walk, _position(after, asked), status)
    if not looked_for:
        found, position = _sized(below, limit, max_bytes)
    else:
        found, position = _looked_through(below, looked_for, limit, max_bytes)
    return Page(jobs=found, next_cursor=None if position is None else _cursor(position, asked))


def _below(walk: QuerySet[Any], position: int, status: str | None) -> QuerySet[Any]:
    if status == states.RUNNING:
        return walk.filter(back__gt=-position)
    return walk.filter(id__lt=position)


def _check_whole(name: str, value: object, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ValueError(f"{name} must be a whole number from 1 to {high}, not {value!r:.50}.")


def _check_shape(jobs: QuerySet[Any]) -> None:
    if jobs.query.is_sliced:
        raise ValueError("page() takes no slice of a queryset: give limit= and after= instead.")
    if not issubclass(jobs._iterable_class, ModelIterable):
        raise ValueError(
            "page() gives jobs, not values() of them: leave columns unread by only() or defer()."
        )


def checked_text(name: str, value: object, minimum: int, maximum: int) -> str:
    """Do as ``check_text``; ``ValueError``, since nothing is submitted by a read."""
    try:
        return check_text(name, value, minimum, maximum)
    except InvalidSubmission as error:
        raise ValueError(str(error)) from None


def _conditions(*, status: str | None, **names: str | None) -> dict[str, str]:
    """Give the conditions that were given; text that no column can hold is refused."""
    found = {
        name: checked_text(name, value, 1, 100)
        for name, value in names.items()
        if value is not None
    }
    if status is None:
        return found
    if status not in states.JOB_STATUSES:
        raise ValueError(f"status must be one of {', '.join(states.JOB_STATUSES)}.")
    return {**found, "status": status}


# The rows ---------------------------------------------------------------------------------------


def _looked_through(
    below: QuerySet[Any], looked_for: dict[str, str], limit: int, max_bytes: int
) -> tuple[list[Any], int | None]:
    """Do as ``_sized`` among the next ids; where they hold no more, go on below them."""
    newest = _newest(below)
    if newest is None:
        return [], None
    floor = newest - WALKED
    near = below.filter(id__gt=floor, **looked_for)
    found, position = _sized(near, limit, max_bytes)
    if position is None:
        beyond = _newest(below.filter(id__lte=floor))
        position = None if beyond is None else beyond + 1
    return found, position


def _newest(jobs: QuerySet[Any]) -> int | None:
    newest: int | None = jobs.aggregate(newest=Max("id"))["newest"]
    return newest


def _sized(jobs: QuerySet[Any], limit: int, max_bytes: int) -> tuple[list[Any], int | None]:
    """Give the first jobs, as many as fit, and the id below which the others are, if any."""
    sql, params = _statement(jobs, limit, max_bytes)
    rows = [(row, *_taken(row)) for row in jobs.raw(sql, params)]
    found = [row for row, fits, _ in rows if fits]
    if len(found) == len(rows):
        return found, None
    if not found:
        row, _, octets = rows[0]
        raise ValueError(
            f"job {row.pk} holds {octets} bytes of text, and max_bytes is {max_bytes}: give more"
            f" (at most {BYTES_MAX}), or leave long columns unread, as"
            ' Job.objects.defer("payload", "checkpoint", "result").page(...) does.'
        )
    return found, found[-1].pk


def _taken(row: Any) -> tuple[bool, int]:
    """Take what is no column of a job off it."""
    return vars(row).pop("fits"), vars(row).pop("octets")


def _statement(jobs: QuerySet[Any], limit: int, max_bytes: int) -> tuple[str, list[Any]]:
    """Write what reads the jobs that fit and, of one more, its size.

    It is one statement, so that no job grows between the judgement and the reading.
    """
    near, params = _compiled(jobs.values("id")[: limit + 1])
    # Empty where nothing is left out.
    mask: Any = jobs.query.get_select_mask()
    read = [field for field in jobs.model._meta.concrete_fields if not mask or field in mask]
    columns = columns_of([field for field in read if not field.primary_key], "j", jobs.db)
    octets = dialect_for(jobs.db).octets
    sizes = [octets(f"j.{field.column}") for field in read if isinstance(field, TextField)]
    sql = (
        f"WITH near AS ({near}), sized AS (SELECT j.id, {' + '.join(['0', *sizes])} AS octets"
        f" FROM near JOIN {JOBS} j ON j.id = near.id),"
        " judged AS (SELECT id, octets, SUM(octets) OVER (ORDER BY id DESC) <= %s"
        " AND ROW_NUMBER() OVER (ORDER BY id DESC) <= %s AS fits FROM sized)"
        f" SELECT d.id, d.octets, d.fits, {columns} FROM judged d"
        f" LEFT JOIN {JOBS} j ON j.id = d.id AND d.fits ORDER BY d.id DESC"
    )
    return sql, [*params, max_bytes, limit]


def _compiled(jobs: QuerySet[Any]) -> tuple[str, list[Any]]:
    sql, params = jobs.query.get_compiler(using=jobs.db).as_sql()
    return sql, list(params)


# The cursor -------------------------------------------------------------------------------------


def _asked(jobs: QuerySet[Any]) -> bytes:
    """Give what tells this query from others: its conditions, the queryset's own included."""
    if len(jobs.query.alias_map) > 1:
        raise ValueError("page() takes conditions on the job's own columns alone.")
    return repr(_compiled(jobs.values("id"))).encode()


def _cursor(position: int, asked: bytes) -> str:
    digest = hashlib.sha256(b"%d %b" % (position, asked)).digest()
    return base64.urlsafe_b64encode(_CURSOR.pack(position, digest[:16])).decode()


def _position(cursor: str, asked: bytes) -> int:
    """Read a cursor; ``InvalidCursor`` unless it is the very text that was made for this query."""
    try:
        position: int = _CURSOR.unpack(base64.urlsafe_b64decode(cursor))[0]
        is_ours = cursor == _cursor(position, asked)
    except (TypeError, ValueError, struct.error):
        is_ours = False
    if not is_ours:
        raise InvalidCursor(
            "after= is no cursor of this query: give the next_cursor of a page with the same scope,"
            " handler and status and the same values in filter() (compute a moving one, such as"
            " now(), once), or begin without after=."
        )
    return position
