"""The example's own tests: they pass, and notice a handler that is not idempotent."""

from __future__ import annotations

import re

from .shop import NewShop

# What is returned is written after the handler, in a transaction of its own.
COMPLETE = 'ctx.complete({"cents": payload.cents})'
RETURN = 'return {"cents": payload.cents}'
CHECKPOINT = "            ctx.checkpoint(done)\n"


def test_the_shops_own_tests_pass_and_notice_what_is_not_idempotent(new_shop: NewShop) -> None:
    sound, faulty = new_shop(), new_shop()
    faulty.change("shop/jobs.py", COMPLETE, RETURN)
    faulty.change("shop/jobs.py", CHECKPOINT, "")
    passing, failing = (shop.start("manage.py", "test", "--noinput") for shop in (sound, faulty))
    assert passing.ends() == 0, passing.output()
    assert re.search(r"Ran 6 tests in .*\n\nOK", passing.output())

    assert failing.ends() == 1
    said = failing.output()
    assert "FAILED (failures=3)" in said
    # The deposit in both kinds of test case, and the import.
    failed = re.findall(
        r"CrashPointFailed: after a crash (\w+) statement \d+ on .default.: (.*)", said
    )
    assert {when for when, _ in failed} == {"after"}
    assert all(re.match("COMMIT|RELEASE", sql) for _, sql in failed)
    assert sorted(sql.rpartition("AssertionError: ")[2][:15] for _, sql in failed) == [
        "1000 != 500",
        "1000 != 500",
        "the job is fail",
    ]
