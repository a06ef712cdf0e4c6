"""What the subcommands of ``manage.py jobs`` share."""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...transitions.operators import Done, recorded

Options = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """One subcommand: its arguments, what it does, and how that reads.

    ``run(alias, options)`` gives a value that JSON can hold, datetimes included; ``lines``
    makes the text of it. An error of this package is told in its one sentence. Where not
    ``succeeded(answer)``, the exit code is 1.
    """

    name: str
    help: str
    run: Callable[[str, Options], Any]
    lines: Callable[[Any], Iterable[str]]
    arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    succeeded: Callable[[Any], bool] = lambda answer: True


def operator() -> str:
    """Give who is at the keyboard, for the record of what operators do."""
    try:
        return f"{getpass.getuser()} (manage.py)"
    except (OSError, KeyError, ImportError):
        # No name belongs to the number that the process runs under.
        return "manage.py"


def recorded_move(
    kind: str, action: str, move: Callable[[str, str], str]
) -> Callable[[str, Options], dict[str, Any]]:
    """Make a move on what the option ``kind`` names, and its record, in one transaction."""

    def run(alias: str, options: Options) -> dict[str, Any]:
        name = options[kind]

        def moved() -> Done:
            return Done(outcome=move(alias, name), subject=f"{kind} {name}")

        done = recorded(alias, moved, action=action, operator=operator())
        return {kind: name, "outcome": done.outcome}

    return run


def plain(text: str) -> str:
    """Give a line without what a terminal obeys, or what begins another line."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def shown(instant: datetime | None) -> str:
    """Show an instant in UTC, to the minute."""
    return "-" if instant is None else f"{instant:%Y-%m-%d %H:%M}"


def table(rows: list[list[str]]) -> list[str]:
    """Lay rows out in columns; the first one is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
