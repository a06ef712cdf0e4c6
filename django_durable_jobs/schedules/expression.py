"""What a cron text means: our grammar reads it, and croniter must agree (CONTRACT 5.1).

croniter never sees a text that the grammar has not accepted, and then with every value written
out: by itself it takes seconds, random and hashed fields, wraps reversed ranges around, reads
``5-5`` as ``*`` and calls 31 February valid. Nothing but the sets is asked afterwards.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field

from ..exceptions import InvalidSchedule

# Longer than all five fields written out value by value.
MAX_LENGTH = 1000
EXAMPLE = '"30 4 * * 1-5" (04:30 from Monday to Friday)'

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    name: str
    low: int
    high: int
    names: dict[str, int] = field(default_factory=dict)

    @property
    def every(self) -> frozenset[int]:
        return frozenset(range(self.low, self.high + 1))


_FIELDS = (
    _Field(name="minute", low=0, high=59),
    _Field(name="hour", low=0, high=23),
    _Field(name="day of month", low=1, high=31),
    _Field(
        name="month", low=1, high=12, names={name: n for n, name in enumerate(_MONTHS, start=1)}
    ),
    _Field(name="day of week", low=0, high=6, names={name: n for n, name in enumerate(_WEEKDAYS)}),
)

_VALUE = "[0-9]{1,4}|[a-z]{3}"
_ITEM = re.compile(rf"(?:\*|({_VALUE})(?:-({_VALUE}))?)(?:/([0-9]{{1,4}}))?")
# What other crons know beyond our grammar, as it stands in a field.
_FOREIGN = re.compile(r".*[?#].*|(?:[0-9]*[lw]w?|[a-z]{3}l|[hr])(?:[-(/].*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """The minutes, hours, days, months and weekdays (Sunday 0) that a cron text names.

    A day field is restricted if it was written as anything but ``*``. Where both are, a day
    that either of them names will do.
    """

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    days_restricted: bool
    weekdays_restricted: bool
    # Written with * in the hours, it is meant as an interval rather than as times of the day.
    interval_like: bool = field(default=False, compare=False)

    def names_day(self, day: int, month: int, weekday: int) -> bool:
        """Tell whether a date is named; ``weekday`` counts from Sunday, 0."""
        if month not in self.months:
            return False
        if self.days_restricted and self.weekdays_restricted:
            return day in self.days or weekday in self.weekdays
        return day in self.days and weekday in self.weekdays

    def fingerprint(self, zone: str) -> str:
        """Give the hash of what it means in a time zone (CONTRACT 5.2)."""
        sets = (self.minutes, self.hours, self.days, self.months, self.weekdays)
        meaning = [
            [sorted(values) for values in sets],
            [self.days_restricted, self.weekdays_restricted],
            zone,
        ]
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()


def parse(text: object) -> Expression:
    """Give what a cron text means; ``InvalidSchedule`` names the field and what to write.

    Bounded in time and memory, whatever the text holds.
    """
    written = _fields(text)
    sets = [_values(*pair) for pair in zip(_FIELDS, written, strict=True)]
    _have_croniter_agree(sets)
    minutes, hours, days, months, weekdays = sets
    expression = Expression(
        minutes=minutes,
        hours=hours,
        days=days,
        months=months,
        weekdays=weekdays,
        days_restricted=written[2] != "*",
        weekdays_restricted=written[4] != "*",
        interval_like=written[1].startswith("*"),
    )
    _refuse_dates_that_never_come(expression)
    return expression


def _fields(text: object) -> list[str]:
    if not isinstance(text, str):
        raise InvalidSchedule(f"cron must be text such as {EXAMPLE}, not {type(text).__name__}.")
    if len(text) > MAX_LENGTH:
        raise InvalidSchedule(f"cron has {len(text)} characters; {MAX_LENGTH} are the most.")
    plain = text.replace("\t", " ").strip(" ").lower()
    if not plain.isascii() or not plain.isprintable():
        raise InvalidSchedule(f"cron holds characters that no field has; write {EXAMPLE}.")
    if plain.startswith("@"):
        if plain not in ALIASES:
            raise InvalidSchedule(
                f"cron: {text!r:.50} is unknown; the aliases are {', '.join(ALIASES)}."
            )
        plain = ALIASES[plain]
    fields = plain.split()
    if len(fields) != 5:
        more = " There are no seconds and no years." if len(fields) > 5 else ""
        raise InvalidSchedule(
            "cron has five fields (minute, hour, day of month, month, day of week), and this"
            f" has {len(fields)}.{more} Write it as in {EXAMPLE}."
        )
    return fields


def _values(kind: _Field, text: str) -> frozenset[int]:
    """Give the values that a field names, each item of its list judged by the grammar."""
    return frozenset(value for item in text.split(",") for value in _item(kind, item))


def _item(kind: _Field, item: str) -> range:
    found = _ITEM.fullmatch(item)
    if found is None:
        raise _refused(kind, item, _why(item))
    first, last, step = found.groups()
    low, high = kind.low, kind.high
    if first is not None:
        low = _value(kind, item, first)
        high = low if last is None else _value(kind, item, last)
    if high < low:
        raise _refused(kind, item, _reversed(kind, low, high))
    if step is None:
        return range(low, high + 1)
    if first is not None and last is None:
        whole = f"{low}-{kind.high}/{int(step)}"
        raise _refused(kind, item, f"a step follows * or a range; write {whole}")
    if not 1 <= int(step) <= kind.high:
        raise _refused(kind, item, f"a step is from 1 to {kind.high}, as in */{min(5, kind.high)}")
    return range(low, high + 1, int(step))


def _value(kind: _Field, item: str, text: str) -> int:
    if not text.isdigit():
        if text not in kind.names:
            names = ", ".join(kind.names)
            known = f"the names are {names}" if names else "it has no names, only numbers"
            raise _refused(kind, item, known)
        return kind.names[text]
    value = int(text)
    if not kind.low <= value <= kind.high:
        sunday = "; Sunday is 0" if value == 7 and kind.high == 6 else ""
        raise _refused(kind, item, f"its values are from {kind.low} to {kind.high}{sunday}")
    return value


def _reversed(kind: _Field, low: int, high: int) -> str:
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in ((low, kind.high), (kind.low, high))]
    return f"a range ascends; for one across the end write {','.join(parts)}"


def _why(item: str) -> str:
    if not item:
        return "a list has no empty items, as in 1,15"
    if _FOREIGN.fullmatch(item):
        return "?, L, W, #, H and R are not known here; write *, values, lists, ranges and steps"
    return "write *, values, lists, ascending ranges, and steps after * or a range"


def _refused(kind: _Field, item: str, why: str) -> InvalidSchedule:
    return InvalidSchedule(f'cron: {kind.name} "{item:.30}" is refused: {why}.')


def _have_croniter_agree(sets: list[frozenset[int]]) -> None:
    """Refuse what croniter reads in another way, should a version of it change its meaning."""
    # Imported when a schedule is declared: it costs more than the rest of this package.
    from croniter import croniter

    text = " ".join(",".join(map(str, sorted(values))) for values in sets)
    try:
        expanded = croniter.expand(text)[0]
    except Exception as error:
        raise InvalidSchedule(
            f'cron: croniter refuses "{text:.100}" ({type(error).__name__}).'
        ) from error
    for kind, values, read in zip(_FIELDS, sets, expanded, strict=True):
        if values != (kind.every if read == ["*"] else set(read)):
            raise InvalidSchedule(f"cron: croniter reads the {kind.name} in another way.")


def _refuse_dates_that_never_come(expression: Expression) -> None:
    if not expression.days_restricted or expression.weekdays_restricted:
        return
    if min(expression.days) > max(_LONGEST[month - 1] for month in expression.months):
        raise InvalidSchedule(
            "cron: day of month and month name a date that never comes, such as 31 February;"
            " for the last day of a month run daily and look at the date."
        )
