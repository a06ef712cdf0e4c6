"""The real import, and what can happen to its worker in the middle."""

from __future__ import annotations

import signal
from functools import partial

from ..worker.support import until
from .shop import JOB, Import, Shop, open_shop, packaged_rows, start_import

# Far above two polls and a chunk, far below the lease of a minute.
SOON_SECONDS = 30
SECOND = 1_000_000  # instants are stored in microseconds
CHUNK = 500
# Not all of them: who is stopped late, on a slow machine, is stopped before its end.
MOST, ALL = 20_000, 10**9


def assert_imported_once(shop: Shop, imported: Import) -> None:
    total = packaged_rows()
    assert total > 20_000
    assert imported.written() == total
    assert shop.count("shop_airport") == total
    assert imported.job("status", "progress", "error_category") == ("succeeded", 1.0, None)
    assert imported.checkpoint() == total


def assert_goes_on_after_the_checkpoint(imported: Import, rows_before: int) -> None:
    """No attempt of the second worker wrote one of those rows, and none of the first another."""
    before, after = set(), set()
    for first_row, _, attempt in imported.chunks():
        (before if first_row < rows_before else after).add(attempt)
    assert before and after
    # (On a slow machine an attempt is over before all its chunks are.)
    assert max(before) < min(after)


def test_another_worker_goes_on_after_the_last_chunk_of_a_killed_one(shop: Shop) -> None:
    shop.hold_import_at(MOST)
    imported = start_import(shop, 0.02)
    first = shop.work("--name=first")
    imported.reaches(30 * CHUNK)
    first.kill()

    imported.expire_lease()
    rows_before = imported.written()
    assert imported.status() == "running"
    assert imported.checkpoint() == rows_before == shop.count("shop_airport")
    assert rows_before < packaged_rows()

    shop.hold_import_at(ALL)
    second = shop.work("--name=second")
    until(imported.ended, "the second worker to finish it")
    second.send()
    assert second.ends() == 0, second.output()
    assert_imported_once(shop, imported)
    assert_goes_on_after_the_checkpoint(imported, rows_before)
    assert imported.attempts("number", "status", "outcome", "worker") == [
        (1, "interrupted", "lost", "first/1"),
        (2, "succeeded", "returned", "second/1"),
    ]


def test_sigterm_lets_an_import_finish(shop: Shop) -> None:
    imported = start_import(shop, 0.01)
    worker = shop.work(SHOP_SHUTDOWN_SECONDS="120")
    imported.reaches(CHUNK)
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0, worker.output()
    assert_imported_once(shop, imported)
    assert imported.attempts("number", "status", "outcome") == [(1, "succeeded", "returned")]


def test_sigterm_requeues_what_takes_longer_than_the_shutdown(shop: Shop) -> None:
    shop.hold_import_at(MOST)
    imported = start_import(shop, 0.02)
    worker = shop.work(SHOP_SHUTDOWN_SECONDS="0.2")
    imported.reaches(2 * CHUNK)
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0, worker.output()

    rows_before = imported.written()
    assert imported.checkpoint() == rows_before < packaged_rows()
    assert imported.job("status", "attempt_count", "granted_attempts") == ("queued", 1, 1)
    assert imported.attempts("number", "status", "outcome") == [(1, "interrupted", "stopped")]

    shop.hold_import_at(ALL)
    again = shop.work("--drain")
    assert again.ends() == 0, again.output()
    assert_imported_once(shop, imported)
    assert_goes_on_after_the_checkpoint(imported, rows_before)
    assert [status for (status,) in imported.attempts("status")] == ["interrupted", "succeeded"]


def test_the_pages_show_an_import_and_cancel_it(shop: Shop) -> None:
    shop.hold_import_at(CHUNK)
    worker = shop.work()
    with open_shop(shop) as browser:
        page = browser.submit("/imports/", source="", speed="0.1").location
        imported = Import(shop, int(page.strip("/").rpartition("/")[2]))
        # A second request for one finds the one that is live.
        assert browser.submit("/imports/", source="", speed="0.0").location == page
        assert shop.count(JOB) == 1

        seen = [browser.get(f"{page}status/").json()]

        def shows(rows: int) -> bool:
            seen.append(browser.get(f"{page}status/").json())
            return seen[-1]["rows"] == rows

        for rows in range(CHUNK, 7 * CHUNK, CHUNK):
            shop.hold_import_at(rows)
            until(partial(shows, rows), "the page to count the rows")
        # A view reads the job, then its rows: the first of these may come in between.
        running = [status for status in seen if status["rows"] > CHUNK]
        assert {status["status"] for status in running} == {"running"}
        assert {(status["finished"], status["can_cancel"]) for status in running} == {(False, True)}
        for figure in ("rows", "percent"):
            values = [status[figure] for status in seen]
            assert values == sorted(values)
            assert len(set(values)) > 3, values
        html = browser.get(page)
        assert html.status == 200
        assert "Running" in html.text
        assert "Cancel the import" in html.text
        for address in ("/imports/", "/jobs/", "/orders/"):
            assert browser.get(address).status == 200
        assert page in browser.get("/imports/").text

        assert browser.submit(f"{page}cancel/", page=page).location == page
        until(imported.ended, "the import to stop")
        status = browser.get(f"{page}status/").json()
        assert (status["status"], status["text"]) == ("cancelled", "Cancelled")
        assert (status["finished"], status["can_cancel"]) == (True, False)
        assert "Cancel the import" not in browser.get(page).text

    worker.send()
    assert worker.ends() == 0, worker.output()
    (attempt,) = imported.attempts("status", "outcome", "cancel_requested_at", "finished_at")
    assert attempt[:2] == ("cancelled", "stopped")
    assert (attempt[3] - attempt[2]) / SECOND < SOON_SECONDS
    assert imported.job("status", "result") == ("cancelled", None)
    rows = imported.written()
    assert 6 * CHUNK <= rows < packaged_rows()
    assert status["rows"] == rows == imported.checkpoint() == shop.count("shop_airport")
