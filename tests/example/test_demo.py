"""`make demo`: it proves what it says, and ends with an error if it cannot."""

from __future__ import annotations

import os
import re
import signal

from ..worker.support import parent_of, until
from .shop import NewShop, Process, Shop, sqlite_url


def start_demo(shop: Shop) -> Process:
    if "DATABASE_URL" not in shop.environment:
        # As `make demo` does without one: in a fresh file.
        shop.database_url = sqlite_url(shop.folder / ".demo" / "demo.sqlite3")
    return shop.start("demo.py")


def claims(output: str) -> dict[str, str]:
    """Give the lines of the proof: what was claimed, and what was found."""
    return dict(re.findall(r"^(?:ok|NO)  (.+): (.+)$", output, re.MULTILINE))


def test_the_demo_prints_the_proof_and_what_it_says_is_in_the_tables(new_shop: NewShop) -> None:
    shop = new_shop()
    demo = start_demo(shop)
    assert demo.ends() == 0, demo.output()
    output = demo.output()
    assert "All as it should be." in output
    assert "NO  " not in output
    assert max(map(len, output.splitlines())) < 100

    rows = shop.count("shop_airport")
    assert rows == shop.value("SELECT sum(rows) FROM shop_importedchunk") > 20_000
    assert claims(output) == {
        "jobs that succeeded": "14",
        "orders confirmed exactly once": "5",
        "rolled-back order: rows": "0",
        "rolled-back order: jobs": "0",
        "rolled-back order: messages": "0",
        "message delivered twice: inbox rows": "1",
        "message delivered twice: payments": "1",
        "message delivered twice: bookings": "1",
        "messages in the outbox": "6",
        "messages sent": "6",
        "messages still waiting": "0",
        "rows imported, chunk by chunk": str(rows),
        "airports in the table": str(rows),
        "attempts of the job that fails twice": "3",
    }
    assert shop.rows("SELECT confirmations FROM shop_order") == [(1,)] * 5
    assert shop.rows("SELECT bookings FROM shop_payment") == [(1,)]
    table = re.search(r"^handler .*?\n\n", output, re.MULTILINE | re.DOTALL)
    assert table is not None
    assert [line.split()[:4] for line in table[0].splitlines()[1:-1]] == [
        ["shop.book_payment", "succeeded", "1", "1"],
        ["shop.confirm_order", "succeeded", "5", "5"],
        ["shop.flaky", "succeeded", "1", "3"],
        ["shop.import_airports", "succeeded", "1", "1"],
        ["shop.relay_outbox", "succeeded", "6", "6"],
    ]
    assert shop.alive() == []


def test_the_demo_fails_if_a_handler_fails_or_an_effect_happens_twice(new_shop: NewShop) -> None:
    failing, twice = new_shop(), new_shop()
    failing.change("shop/jobs.py", "        ctx.complete()\n\n\n@dataclass\nclass Bo", LOUD)
    twice.change("shop/jobs.py", 'F("confirmations") + 1', 'F("confirmations") + 2')
    demos = [start_demo(failing), start_demo(twice)]
    assert [demo.ends() for demo in demos] == [1, 1], [demo.output() for demo in demos]

    assert "NO  jobs that succeeded: 9, not 14" in demos[0].output()
    assert "NO  orders confirmed exactly once: 0, not 5" in demos[0].output()
    # What failed has left nothing behind.
    assert failing.rows("SELECT confirmations FROM shop_order") == [(0,)] * 5
    assert re.search(r"shop.confirm_order +failed +5 +5 ", demos[0].output())

    assert "NO  orders confirmed exactly once: 0, not 5" in demos[1].output()
    assert "ok  jobs that succeeded: 14" in demos[1].output()
    for demo in demos:
        assert "The demo failed. The tables do not hold what they should" in demo.output()
        assert "All as it should be." not in demo.output()


# The same place, an error in the transaction, and the beginning of the next class.
LOUD = """\
        raise PermanentError("out of paper")


@dataclass
class Bo"""


def test_the_demo_fails_if_its_worker_dies(new_shop: NewShop) -> None:
    shop = new_shop()
    shop.hold_import_at(500)
    demo = start_demo(shop)
    until(lambda: "Started the import" in demo.output(), "the jobs to be staged")
    worker = until(lambda: [pid for pid in shop.alive() if parent_of(pid) == demo.pid])[0]
    until(lambda: shop.count("shop_importedchunk"), "the import to be under way")
    os.killpg(worker, signal.SIGKILL)
    assert demo.ends() == 1, demo.output()
    assert "The demo failed. The worker ended before its work was done." in demo.output()
    assert "All as it should be." not in demo.output()
