"""``manage.py jobs``: pause queues and resume them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from ...transitions.queues import pause_queue, resume_queue
from .base import Subcommand, recorded_move


def _lines(done: dict[str, Any]) -> Iterable[str]:
    yield f"{done['queue']}: {done['outcome']}"


def _takes_queue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="NAME", help="The queue's name.")


SUBCOMMANDS = (
    Subcommand(
        name="pause-queue",
        help="Have no job of a queue begin until it is resumed.",
        run=recorded_move("queue", "pause_queue", pause_queue),
        lines=_lines,
        arguments=_takes_queue,
    ),
    Subcommand(
        name="resume-queue",
        help="Let the jobs of a paused queue begin again.",
        run=recorded_move("queue", "resume_queue", resume_queue),
        lines=_lines,
        arguments=_takes_queue,
    ),
)
