"""The grammar of CONTRACT 5.1 (FAULTS 23), and what an expression means."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
from croniter import croniter
from hypothesis import example, given, settings
from hypothesis import strategies as st

from django_durable_jobs import InvalidSchedule
from django_durable_jobs.schedules.expression import ALIASES, MAX_LENGTH, Expression, parse
from tests._marks import no_database, shown

from .oracle import Cron, cron, crons

pytestmark = no_database

REFUSED = {
    # FAULTS 23, and what croniter takes for something else.
    "59/15 * * * *": "write 59-59/15",
    "5/15 * * * *": "write 5-59/15",
    "5-1 * * * *": "write 5-59,0-1",
    "0 0 * * sat-sun": "write 6,0",
    "0 22-4 * * *": "write 22-23,0-4",
    "R R * * *": "not known here",
    "H H * * *": "not known here",
    "H/5 * * * *": "not known here",
    "R(0-30) * * * *": "not known here",
    "0 0 L * *": "not known here",
    "0 0 LW * *": "not known here",
    "0 0 15W * *": "not known here",
    "0 0 * * 5L": "not known here",
    "0 0 * * friL": "not known here",
    "0 0 * * mon#2": "not known here",
    "0 0 ? * *": "not known here",
    "* * * * * *": "no seconds",
    "0 0 0 * * * 2026": "no seconds and no years",
    "* * * *": "has 4",
    "": "has 0",
    "   ": "has 0",
    "*/0 * * * *": "from 1 to 59",
    "1-5/0 * * * *": "from 1 to 59",
    "*/100 * * * *": "from 1 to 59",
    "*/60 * * * *": "from 1 to 59",
    "0 */24 * * *": "from 1 to 23",
    "0 0 */32 * *": "from 1 to 31",
    "0 0 * */13 *": "from 1 to 12",
    "0 0 * * */7": "from 1 to 6",
    "60 * * * *": "from 0 to 59",
    "0 24 * * *": "from 0 to 23",
    "0 0 0 * *": "from 1 to 31",
    "0 0 32 * *": "from 1 to 31",
    "0 0 * 0 *": "from 1 to 12",
    "0 0 * 13 *": "from 1 to 12",
    "0 0 * * 7": "Sunday is 0",
    "0 0 * * 0-7": "Sunday is 0",
    "0 0 31 2 *": "never comes",
    "0 0 30,31 2 *": "never comes",
    "0 0 31 4 *": "never comes",
    "0 0 31 2,4,6,9,11 *": "never comes",
    "@reboot": "aliases are",
    "@every 5m": "aliases are",
    "mon * * * *": "has no names",
    "0 0 * foo *": "names are jan",
    "0 0 * * monday": "write",
    "1,,2 * * * *": "no empty items",
    ", * * * *": "no empty items",
    "1, 2 * * * *": "has 6",
    "-1 * * * *": "write",
    "*-5 * * * *": "write",
    "1-2-3 * * * *": "write",
    "*/5/2 * * * *": "write",
    "1.5 * * * *": "write",
    "+5 * * * *": "write",
    "0x1 * * * *": "write",
    "99999999999999999999 * * * *": "write",
    "*/99999999999999999999 * * * *": "write",
    "\uff11 * * * *": "characters",
    "* * * * \u0661": "characters",
    "* * * *\n*": "characters",
    "* * * * *\0": "characters",
    "* * * * \ud800": "characters",
    "\u0130 * * * *": "characters",
    ",".join(["1"] * 5000) + " * * * *": "characters",
}


@pytest.mark.parametrize(("text", "told"), REFUSED.items(), ids=[repr(t)[:30] for t in REFUSED])
def test_what_is_refused_and_what_is_said(text: str, told: str, monkeypatch: Any) -> None:
    """And croniter never sees it, except where only the calendar is against it."""
    seen = []
    expand = croniter.expand
    monkeypatch.setattr(croniter, "expand", lambda text: seen.append(text) or expand(text))
    with pytest.raises(InvalidSchedule, match="cron") as caught:
        parse(text)
    assert told in str(caught.value)
    assert len(str(caught.value)) < 300
    assert bool(seen) == (told == "never comes")


@pytest.mark.parametrize("value", [None, 5, b"* * * * *", ["*"] * 5, object()], ids=shown)
def test_a_cron_is_text(value: object) -> None:
    with pytest.raises(InvalidSchedule, match="cron must be text"):
        parse(value)


@pytest.mark.parametrize(
    ("sugar", "plain"),
    [
        *ALIASES.items(),
        ("@Daily", "0 0 * * *"),
        ("0 0 * JAN-mar,Dec Mon-FRI/2", "0 0 * 1-3,12 1-5/2"),
        ("0 0 * * sun,wed", "0 0 * * 0,3"),
        ("05 04 * * *", "5 4 * * *"),
        ("  0\t0  *   * * ", "0 0 * * *"),
        ("*/15 * * * *", "0,15,30,45 * * * *"),
        ("1,1,1,2-3 * * * *", "1-3 * * * *"),
    ],
)
def test_sugar_means_what_plain_text_means(sugar: str, plain: str) -> None:
    assert parse(sugar) == parse(plain)
    assert parse(sugar).fingerprint("UTC") == parse(plain).fingerprint("UTC")


def test_a_day_field_is_restricted_by_how_it_is_written() -> None:
    """``1-31`` and ``*/1`` name every day and restrict all the same."""
    every = parse("0 0 * * *")
    assert not every.days_restricted and not every.weekdays_restricted
    for days in ("1-31", "*/1", "*/2", "1"):
        assert parse(f"0 0 {days} * *").days_restricted
    for weekdays in ("0-6", "*/1", "sun-sat"):
        assert parse(f"0 0 * * {weekdays}").weekdays_restricted
    either = parse("0 0 13 * fri")
    assert either.names_day(13, 5, 1) and either.names_day(14, 5, 5)
    assert not either.names_day(14, 5, 1)
    # Either may match, so it comes every day, and 31 February on each Monday of February.
    assert parse("0 0 1 * 0-6").names_day(17, 3, 2)
    assert parse("0 0 31 2 1").names_day(3, 2, 1)


def test_the_fingerprint_is_of_the_meaning() -> None:
    plain = parse("0 0 * * *").fingerprint("UTC")
    assert len(plain) == 64
    others = ["1 0 * * *", "0 1 * * *", "0 0 1 * *", "0 0 * 1 *", "0 0 * * 1"]
    # The same days, and yet another meaning once the other field is restricted as well.
    others += ["0 0 1-31 * *", "0 0 * * 0-6", "0 0 1-31 * 0-6"]
    found = {plain, parse("0 0 * * *").fingerprint("Europe/Paris")}
    found |= {parse(text).fingerprint("UTC") for text in others}
    assert len(found) == len(others) + 2


@pytest.mark.parametrize(
    "answer", [["l"], [60], [], ["*", 1], [None], [0, 15, 30], [0, 15, 30, 45, 50], ["*"]], ids=str
)
def test_a_parser_that_reads_it_in_another_way_is_caught(
    answer: list[Any], monkeypatch: Any
) -> None:
    full: list[list[Any]] = [["*"]] * 4
    monkeypatch.setattr(croniter, "expand", lambda text: ([answer, *full], {}))
    with pytest.raises(InvalidSchedule, match="croniter reads the minute in another way"):
        parse("*/15 * * * *")


@pytest.mark.parametrize("error", [ValueError, KeyError, RecursionError])
def test_what_a_parser_raises_is_told(error: type[Exception], monkeypatch: Any) -> None:
    def refuse(text: str) -> Any:
        raise error

    monkeypatch.setattr(croniter, "expand", refuse)
    with pytest.raises(InvalidSchedule, match="croniter refuses"):
        parse("* * * * *")


@given(crons())
@settings(max_examples=150)
def test_every_legal_text_means_what_it_was_written_from(written: Cron) -> None:
    if _never_comes(written):
        with pytest.raises(InvalidSchedule, match="never comes"):
            parse(written.text)
        return
    found = parse(written.text)
    assert (found.minutes, found.hours, found.days, found.months, found.weekdays) == (
        written.minutes,
        written.hours,
        written.days,
        written.months,
        written.weekdays,
    )
    assert found.days_restricted == (not written.any_day)
    assert found.weekdays_restricted == (not written.any_weekday)
    assert found == _again(found)


def _never_comes(written: Cron) -> bool:
    # 2096 is a leap year; no month is longer in another year.
    return written.any_weekday and not any(
        written.on_date(2096, month, day)
        for month in range(1, 13)
        for day in range(1, 32)
        if day <= (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month - 1]
    )


def _again(found: Expression) -> Expression:
    """Write the sets out value by value, and read that."""
    sets = (found.minutes, found.hours, found.days, found.months, found.weekdays)
    fields = [",".join(map(str, sorted(values))) for values in sets]
    fields[2] = fields[2] if found.days_restricted else "*"
    fields[4] = fields[4] if found.weekdays_restricted else "*"
    return parse(" ".join(fields))


_ALPHABET = st.sampled_from(list("0123456789*/,-#?lwhrLWHR@ \t") + ["mon", "jan", "l", "\0", "é"])


@given(st.one_of(st.text(max_size=60), st.lists(_ALPHABET, max_size=80).map("".join)))
@example("*/" + "9" * 900 + " * * * *")
@example("-".join(["1"] * 400) + " * * * *")
@example(",".join(["*/1"] * 240) + " * * * *")
@example("@" * MAX_LENGTH)
@example("1" * 10**6)
@settings(max_examples=300)
def test_any_text_is_judged_soon_and_in_little_memory(text: str) -> None:
    began = time.process_time()
    tracemalloc.start()
    try:
        parse(text)
    except InvalidSchedule:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - began < 5
    assert peak < 2_000_000


def test_the_oracle_reads_plain_texts() -> None:
    read = cron("0,30 1-5/2 * */6 1")
    assert (read.minutes, read.hours, read.months, read.weekdays) == (
        {0, 30},
        {1, 3, 5},
        {1, 7},
        {1},
    )
    assert read.any_day and not read.any_weekday
