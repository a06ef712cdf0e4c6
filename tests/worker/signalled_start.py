"""``runjobs`` that is signalled at one moment of its start: ``python -m`` this, then ``runjobs``.

Environment variables:

SIGNALLED_AT    the name of the moment.
SIGNALLED_BY    the signals that come then, with commas between.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import django

django.setup()

from django.core.management import execute_from_command_line  # noqa: E402

from django_durable_jobs.management.commands import runjobs  # noqa: E402
from django_durable_jobs.worker import run, supervisor  # noqa: E402
from django_durable_jobs.worker.reloading import Reloading  # noqa: E402

# A process that this one becomes is not signalled again.
MOMENT = os.environ.pop("SIGNALLED_AT", "")
SIGNALS = [signal.Signals[name] for name in os.environ.pop("SIGNALLED_BY", "").split(",") if name]


def signalled(whom: int = os.getpid()) -> None:
    for number in SIGNALS:
        os.kill(whom, number)


def before(module: Any, name: str, act: Callable[[], None] = signalled) -> None:
    real = getattr(module, name)

    def late(*arguments: Any, **options: Any) -> Any:
        act()
        return real(*arguments, **options)

    setattr(module, name, late)


def in_child(whom: Callable[[], int]) -> None:
    """Right after the fork, before the child has done anything at all."""
    before(
        supervisor,
        "lifeline",
        lambda: os.register_at_fork(after_in_child=lambda: signalled(whom())),
    )


def changed(reloading: Reloading, on_change: Callable[[], None]) -> None:
    reloading._changed.set()
    on_change()


def at_exec() -> None:
    Reloading.watch = changed  # type: ignore[method-assign]
    before(os, "execv")


MOMENTS: dict[str, Callable[[], None]] = {
    "check": lambda: before(run, "require_migrations"),
    "banner": lambda: before(runjobs.Command, "_banner"),
    "worker": lambda: before(run, "Worker"),
    "child": lambda: in_child(os.getpid),
    "group": lambda: in_child(lambda: -os.getpgid(0)),
    "exec": at_exec,
}

if __name__ == "__main__":
    if MOMENT:
        MOMENTS[MOMENT]()
    execute_from_command_line(sys.argv)
