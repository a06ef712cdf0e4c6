"""``Job.objects.page()``: every job once, within its bounds, and by its own cursors (3.11)."""

from __future__ import annotations

import base64
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_durable_jobs import DurableJobsError, InvalidCursor, job, pages
from django_durable_jobs.models import Job
from django_durable_jobs.pages import Page

from ._rows import NOW, job_row

pytestmark = pytest.mark.django_db

MIB = 1024 * 1024
ENDED = {"status": "failed", "finished_at": NOW}


def stored(count: int, **changes: Any) -> list[int]:
    """Store jobs of one instant; give their ids, the newest first."""
    Job.objects.bulk_create(job_row(**changes) for _ in range(count))
    return list(Job.objects.order_by("-id").values_list("id", flat=True)[:count])


def ids(page: Page) -> list[int]:
    return [one.pk for one in page.jobs]


def walked(read: Callable[..., Page] | None = None, **options: Any) -> Iterator[Page]:
    """Read page after page to the end."""
    after = None
    while True:
        page = (read or Job.objects.page)(after=after, **options)
        yield page
        after = page.next_cursor
        if after is None:
            return


# Order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "columns"),
    [
        ({}, {}),
        ({"status": "queued"}, {}),
        ({"status": "failed"}, ENDED),
        ({"status": "running"}, {"status": "running"}),
        ({"scope": "a"}, {"scope": "a"}),
        ({"scope": "a", "handler": "tests.rows", "status": "failed"}, {"scope": "a", **ENDED}),
    ],
    ids=str,
)
def test_a_thousand_jobs_of_one_instant_come_each_once(
    filters: dict[str, str], columns: dict[str, Any]
) -> None:
    expected = stored(1000, **columns)
    found = list(walked(limit=37, **filters))
    assert [one for page in found for one in ids(page)] == expected
    assert [len(page.jobs) for page in found] == [37] * 27 + [1]
    exact = list(walked(limit=100, **filters))
    assert [one for page in exact for one in ids(page)] == expected
    assert len(exact) == 10


def test_what_comes_and_goes_meanwhile_moves_no_other_job() -> None:
    old = stored(60)
    found = ids(first := Job.objects.page(limit=20))
    stored(5)
    Job.objects.filter(pk__in=[old[19], old[30]]).delete()
    for page in walked(lambda after: Job.objects.page(after=after or first.next_cursor)):
        found += ids(page)
    assert found == old[:30] + old[31:]


def test_an_empty_table_and_a_whole_page_end_the_pages() -> None:
    assert Job.objects.page() == Page(jobs=[], next_cursor=None)
    assert Job.objects.page(handler="x") == Page(jobs=[], next_cursor=None)
    expected = stored(25)
    assert ids(page := Job.objects.page()) == expected
    assert page.next_cursor is None


# Filters ----------------------------------------------------------------------------------------


def test_filters_narrow_and_scopes_are_not_crossed() -> None:
    unscoped = stored(2)
    failed = stored(1, handler="other", **ENDED)
    mine = stored(2, scope="a")
    others = stored(1, scope="A", handler="other")
    assert ids(Job.objects.page()) == others + mine + failed + unscoped
    assert ids(Job.objects.page(scope="a")) == mine
    assert ids(Job.objects.page(scope="")) == failed + unscoped
    assert ids(Job.objects.page(handler="other")) == others + failed
    assert ids(Job.objects.page(handler="other", status="failed")) == failed
    assert ids(Job.objects.page(scope="A", handler="other", status="queued")) == others
    assert ids(Job.objects.page(scope="a", status="failed")) == []
    assert ids(Job.objects.in_scope("a").page()) == mine
    assert ids(Job.objects.in_scope("a").page(handler="other")) == []
    assert ids(Job.objects.in_scope("a").page(scope="A")) == []
    for jobs in (Job.objects.using("default"), Job.objects.db_manager("default")):
        page = jobs.page(scope="a")
        assert ids(page) == mine
        assert {one._state.db for one in page.jobs} == {"default"}
    one = Job.objects.page(handler="other", status="failed").jobs[0]
    whole = Job.objects.get(pk=one.pk)
    fields = [field.attname for field in Job._meta.concrete_fields]
    assert {name: getattr(one, name) for name in fields} == {
        name: getattr(whole, name) for name in fields
    }
    assert one.get_deferred_fields() == set()
    assert vars(one).keys() == vars(whole).keys()


def test_conditions_of_ones_own_are_kept_from_page_to_page() -> None:
    expected = stored(3, queue="mails")
    stored(3)
    jobs = Job.objects.filter(queue="mails")
    assert [ids(page) for page in walked(jobs.page, limit=2)] == [expected[:2], expected[2:]]
    assert Job.objects.none().page() == Page(jobs=[], next_cursor=None)
    with pytest.raises(ValueError, match="own columns"):
        Job.objects.filter(attempts__worker="w").page()
    # One of its own query in all but a value.
    cursor = jobs.page(limit=1).next_cursor
    with pytest.raises(InvalidCursor, match=r"the same values in filter\(\)"):
        Job.objects.filter(queue="other").page(after=cursor)


def test_the_order_is_its_own_and_other_shapes_are_refused() -> None:
    expected = stored(3)
    assert ids(Job.objects.order_by("id").page()) == ids(Job.objects.reverse().page()) == expected
    walked = []
    page = Job.objects.reverse().page(limit=1)
    while page.jobs:
        walked += ids(page)
        if page.next_cursor is None:
            break
        page = Job.objects.reverse().page(limit=1, after=page.next_cursor)
    assert walked == expected
    wrong: list[tuple[Any, str]] = [
        (Job.objects.all()[:2], "no slice"),
        (Job.objects.all()[1:], "no slice"),
        (Job.objects.values("id"), r"not values\(\)"),
        (Job.objects.values_list("id", flat=True), r"not values\(\)"),
    ]
    for jobs, told in wrong:
        with (
            CaptureQueriesContext(connection) as queries,
            pytest.raises(ValueError, match=rf"^page\(\) .*{told}.*\.$"),
        ):
            jobs.page()
        assert not queries.captured_queries


def test_a_decorated_handler_stands_for_its_name(durable_handlers: Any) -> None:
    @job("tests.paged", version=2)
    def paged(ctx: Any) -> None: ...

    first, second = (job_row(handler="tests.paged", handler_version=n) for n in (1, 2))
    for one in (first, job_row(), second):
        one.save()
    page = Job.objects.page(handler=paged, limit=1)
    assert ids(page) == [second.pk]
    # A page by the name goes on where it ended.
    assert ids(Job.objects.page(handler="tests.paged", after=page.next_cursor)) == [first.pk]


def test_a_page_looks_through_a_bounded_stretch_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "WALKED", 10)
    oldest = stored(1, handler="rare")
    stored(25)
    middle = stored(2, handler="rare")
    stored(35)
    found = list(walked(handler="rare"))
    assert [one for page in found for one in ids(page)] == middle + oldest
    assert ids(found[0]) == []
    assert len(found) == 7
    # What is not there is not looked through.
    Job.objects.exclude(handler="rare").delete()
    assert [ids(page) for page in walked(handler="rare")] == [middle, oldest]
    assert [ids(page) for page in walked()] == [middle + oldest]
    # A scope's ids alone count, and what has an index is not looked for.
    mine = stored(1, scope="a", handler="rare")
    stored(25)
    assert [ids(page) for page in walked(scope="a", handler="rare")] == [mine]
    failed = stored(1, **ENDED)
    stored(25)
    assert [ids(page) for page in walked(status="failed")] == [failed]


# Cursors ----------------------------------------------------------------------------------------


def test_a_cursor_of_another_query_is_refused() -> None:
    stored(3, scope="a")
    queries: list[dict[str, Any]] = [
        {},
        {"scope": "a"},
        {"scope": "A"},
        {"scope": ""},
        {"handler": "tests.rows"},
        {"handler": "tests.row"},
        {"status": "queued"},
        {"status": "failed"},
        {"scope": "a", "handler": "tests.rows"},
        {"scope": "a", "handler": "tests.rows", "status": "queued"},
    ]
    cursors = [Job.objects.page(limit=1, **query).next_cursor for query in queries]
    assert cursors.count(None) == 4
    for query in queries:
        for cursor, its in zip(cursors, queries, strict=True):
            if cursor is not None and query != its:
                with pytest.raises(InvalidCursor, match="no cursor of this query"):
                    Job.objects.page(after=cursor, **query)
    # The size of a page may change, and in_scope() asks the same as scope=.
    assert len(Job.objects.page(after=cursors[0], limit=100, max_bytes=MIB).jobs) == 2
    assert len(Job.objects.in_scope("a").page(after=cursors[1]).jobs) == 2


def test_a_damaged_or_foreign_cursor_is_told_before_any_query() -> None:
    stored(3)
    cursor = Job.objects.page(limit=1).next_cursor
    assert cursor is not None
    damaged: list[Any] = [cursor[:place] + "-" + cursor[place + 1 :] for place in range(32)]
    damaged += [cursor[:-1], cursor + "=", cursor + "A", f" {cursor}", f"{cursor}\n", cursor * 9]
    damaged += ["", "0", "null", "é" * 32, "\ud800" * 32, "\0" * 32, "=" * 32, "A" * 32]
    damaged += [base64.urlsafe_b64encode(b"\xff" * 24).decode(), cursor.encode(), 0, 7, True, 1.5]
    damaged += [[cursor], {}, object(), base64.urlsafe_b64decode(cursor)]
    for one in damaged:
        if one == cursor:
            continue
        with CaptureQueriesContext(connection) as queries, pytest.raises(InvalidCursor) as caught:
            Job.objects.page(after=one)
        assert not queries.captured_queries
        assert isinstance(caught.value, DurableJobsError)
        assert isinstance(caught.value, ValueError)


# Bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, False, 1.0, 25.5, "5", b"5", None, [1], 10**30])
def test_bounds_that_are_none_are_refused(value: Any) -> None:
    for name, most in (("limit", 100), ("max_bytes", MIB)):
        with (
            CaptureQueriesContext(connection) as queries,
            pytest.raises(ValueError, match=f"{name} must be a whole number from 1 to {most}"),
        ):
            Job.objects.page(**{name: value})
        assert not queries.captured_queries


def test_bounds_are_taken_to_their_ends() -> None:
    expected = stored(101)
    assert ids(Job.objects.page(limit=100, max_bytes=MIB)) == expected[:100]
    assert ids(Job.objects.page(limit=1)) == expected[:1]
    for name, value in (("limit", 101), ("max_bytes", MIB + 1)):
        with pytest.raises(ValueError, match=name):
            Job.objects.page(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"scope": 7},
        {"scope": "a" * 201},
        {"scope": "\0"},
        {"handler": 7},
        {"handler": ("tests.rows", 1)},
        {"handler": ""},
        {"handler": "\0"},
        {"handler": "\ud800"},
        {"handler": "a" * 101},
        {"status": "done"},
        {"status": ""},
        {"status": b"queued"},
        {"status": ["queued"]},
        {"status": "timed_out"},
    ],
)
def test_filters_that_no_job_can_meet_are_refused(options: dict[str, Any]) -> None:
    with (
        CaptureQueriesContext(connection) as queries,
        pytest.raises(ValueError, match=next(iter(options))) as caught,
    ):
        Job.objects.page(**options)
    # Nothing was submitted.
    assert type(caught.value) is ValueError
    assert not queries.captured_queries


LONG = ("payload", "checkpoint", "result", "error_summary", "error_traceback")


@pytest.mark.parametrize("column", LONG)
def test_as_many_jobs_come_as_fit_in_bytes(column: str) -> None:
    """Three jobs of 1,000 bytes in a long column, of two bytes to a character."""
    # JSON adds its quotes.
    text = "é" * (499 if column in ("checkpoint", "result") else 500)
    expected = stored(3, **{"payload": "", column: text})
    assert ids(Job.objects.page(max_bytes=3000)) == expected
    for most, count in ((2999, 2), (2000, 2), (1999, 1), (1000, 1)):
        page = Job.objects.page(max_bytes=most)
        assert ids(page) == expected[:count]
        assert page.next_cursor is not None
    found = [one for page in walked(max_bytes=1999) for one in ids(page)]
    assert found == expected
    with pytest.raises(ValueError, match=r"holds 1000 bytes of text, and max_bytes is 999: give"):
        Job.objects.page(max_bytes=999)
    # What is not read costs nothing.
    lean = Job.objects.defer(column).page(max_bytes=3)
    assert ids(lean) == expected
    assert lean.jobs[0].get_deferred_fields() == {column}
    some = Job.objects.only("job_id", "status").page(max_bytes=1)
    assert ids(some) == expected
    assert {"handler", "payload"} < some.jobs[0].get_deferred_fields()


def test_a_job_that_no_page_can_hold_does_not_hide_the_next() -> None:
    before = stored(1)
    large = stored(1, payload="x" * (MIB + 1))
    after = stored(1)
    page = Job.objects.page(limit=2)
    assert ids(page) == after
    with pytest.raises(ValueError, match=rf"job {large[0]} holds {MIB + 1} .*defer\(") as caught:
        Job.objects.page(after=page.next_cursor, max_bytes=MIB)
    assert not isinstance(caught.value, InvalidCursor)
    lean = Job.objects.defer("payload").page(after=page.next_cursor)
    assert ids(lean) == large + before


# Cost -------------------------------------------------------------------------------------------


def test_a_page_reads_no_payload_that_it_does_not_give() -> None:
    """60 payloads of half a MiB: one page holds two of them, and its memory as much."""
    stored(60)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_durable_jobs_job SET payload = %s", ["x" * (MIB // 2)])
    Job.objects.page(limit=1, max_bytes=MIB)
    tracemalloc.start()
    try:
        page = Job.objects.page(limit=50, max_bytes=MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(one.payload) for one in page.jobs] == [MIB // 2] * 2
    # The two, each as bytes and as text at the most, of 30 MiB that match.
    assert peak < 5 * MIB


def test_the_number_of_queries_is_constant() -> None:
    def counts() -> list[int]:
        found = []
        for options in ({}, {"scope": "a"}, {"status": "failed"}, {"handler": "tests.rows"}):
            with CaptureQueriesContext(connection) as queries:
                Job.objects.page(limit=100, **options)
            found.append(len(queries))
        return found

    stored(2, scope="a")
    few = counts()
    assert few == [1, 1, 1, 3]
    stored(300, scope="a")
    # A whole page need not ask what lies beyond.
    assert counts() == [1, 1, 1, 2]
