"""``manage.py jobs``: pause queues and resume them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from ...transitions.operators import Done, recorded
from ...transitions.queues import pause_queue, resume_queue
from .base import Options, Subcommand, operator


def _move(action: str, move: Callable[[str, str], str]) -> Callable[[str, Options], Any]:
    """Make a move on the named queue and its record in one transaction."""

    def run(alias: str, options: Options) -> dict[str, Any]:
        queue = options["queue"]

        def moved() -> Done:
            return Done(outcome=move(alias, queue), subject=f"queue {queue}")

        done = recorded(alias, moved, action=action, operator=operator())
        return {"queue": queue, "outcome": done.outcome}

    return run


def _lines(done: dict[str, Any]) -> Iterable[str]:
    yield f"{done['queue']}: {done['outcome']}"


def _takes_queue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="NAME", help="The queue's name.")


SUBCOMMANDS = (
    Subcommand(
        name="pause-queue",
        help="Have no job of a queue begin until it is resumed.",
        run=_move("pause_queue", pause_queue),
        lines=_lines,
        arguments=_takes_queue,
    ),
    Subcommand(
        name="resume-queue",
        help="Let the jobs of a paused queue begin again.",
        run=_move("resume_queue", resume_queue),
        lines=_lines,
        arguments=_takes_queue,
    ),
)
