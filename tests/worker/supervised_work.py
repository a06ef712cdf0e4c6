"""A supervisor whose children run no worker: ``python -m tests.worker.supervised_work``.

Arguments: a folder, then the name of what each child does. Each child appends its number, its
pid and the monotonic time to the file ``starts`` of the folder.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import django

django.setup()

from django_durable_jobs.worker import supervisor  # noqa: E402
from django_durable_jobs.worker.lifeline import ChildEnd  # noqa: E402
from django_durable_jobs.worker.signals import Stop, stop_on_signal  # noqa: E402
from django_durable_jobs.worker.supervisor import Limits, Supervisor  # noqa: E402

LIMITS = Limits(silence=5.0, stop=60)
# Of those who do not end when they are told to, by the one bound and by the other.
STUBBORN = {
    "halted": Limits(silence=60, stop=0.3, last_silence=0.5),
    "deaf": Limits(silence=60, stop=0.3, last_silence=60, last=1.5),
}
FOLDER = Path(sys.argv[1])


def serve(parent: ChildEnd, *, deaf: bool = False) -> int:
    """Beat until told to stop."""
    told = threading.Event()
    parent.watch(told.set)
    signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    while deaf or not told.wait(0.1):
        parent.beat()
        if deaf:
            time.sleep(0.1)
    return 0


def is_first() -> bool:
    """Tell the first child of place 0."""
    starts = [one.split() for one in (FOLDER / "starts").read_text().splitlines()]
    return next(pid for number, pid, _ in starts if number == "0") == str(os.getpid())


def hold_interpreter(parent: ChildEnd) -> None:
    re.match(r"(a|a)*b", "a" * 60)


def stop_itself(parent: ChildEnd) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    # Any thread may take the signal: this one may run on for a moment before it stops.
    threading.Event().wait()


def busy(parent: ChildEnd) -> int:
    """Beat beside threads that compute."""

    def compute() -> None:
        while True:
            sum(range(1000))

    for _ in range(2):
        threading.Thread(target=compute, daemon=True).start()
    return serve(parent)


def hangs(how: Callable[[ChildEnd], None], *, next_to: Callable[[ChildEnd], int]) -> object:
    def work(number: int, parent: ChildEnd) -> int:
        if number == 1:
            return next_to(parent)
        if is_first():
            how(parent)
        return serve(parent)

    return work


def crash(number: int, parent: ChildEnd) -> int:
    os._exit(3)


def refuse_some_starts() -> None:
    """The third start finds no process to be had, the fourth no descriptor."""
    fork, lifeline = os.fork, supervisor.lifeline
    lines = 0

    def refused(code: int) -> OSError:
        return OSError(code, os.strerror(code))

    def counted_lifeline() -> tuple[supervisor.ParentEnd, socket.socket]:
        nonlocal lines
        lines += 1
        if lines == 4:
            raise refused(errno.EMFILE)
        return lifeline()

    def bounded_fork() -> int:
        if lines == 3:
            raise refused(errno.EAGAIN)
        return fork()

    supervisor.lifeline, os.fork = counted_lifeline, bounded_fork


def crash_once(number: int, parent: ChildEnd) -> int:
    """The first of place 0 crashes, once the other place is served."""
    if number == 0 and is_first():
        while len((FOLDER / "starts").read_text().splitlines()) < 2:
            parent.beat()
            time.sleep(0.05)
        os._exit(3)
    return serve(parent)


def retire(number: int, parent: ChildEnd) -> int:
    """The first two retire and go on until the gate of their pid is open."""
    starts = (FOLDER / "starts").read_text().splitlines()
    if len(starts) > 2:
        return serve(parent)
    parent.retire()
    while not (FOLDER / f"{os.getpid()}.go").exists():
        parent.beat()
        time.sleep(0.05)
    return 4


def all_stats() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # buried meanwhile
            yield path.read_text().rpartition(")")[2]


def orphans(number: int, parent: ChildEnd) -> int:
    """Leave processes to PID 1 and write how many of them it did not bury."""
    for _ in range(3):
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(0.2)
            os._exit(0)
        os.wait()
    for looks in range(600):
        parent.beat()
        time.sleep(0.1)
        stats = list(all_stats())
        unburied = [stat for stat in stats if stat.split()[:2] == ["Z", "1"]]
        if looks >= 10 and not unburied:
            break
    (FOLDER / "unburied").write_text(f"{len(unburied)} of {len(stats)} as {os.getppid()}")
    return serve(parent)


WORK: dict[str, object] = {
    "serve": lambda number, parent: serve(parent),
    "deaf": lambda number, parent: serve(parent, deaf=True),
    "hold": hangs(hold_interpreter, next_to=busy),
    "halted": lambda number, parent: stop_itself(parent),
    "sigstop": hangs(stop_itself, next_to=serve),
    "crash": crash,
    "refused": crash_once,
    "retire": retire,
    "orphans": orphans,
}


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    work = WORK[sys.argv[2]]
    if sys.argv[2] == "refused":
        refuse_some_starts()

    def noted(number: int, parent: ChildEnd, stop: Stop) -> int:
        with (FOLDER / "starts").open("a") as starts:
            starts.write(f"{number} {os.getpid()} {time.monotonic()}\n")
        return work(number, parent)  # type: ignore[operator, no-any-return]

    with stop_on_signal() as stop:
        return Supervisor(int(sys.argv[3]), noted, STUBBORN.get(sys.argv[2], LIMITS)).run(stop)


if __name__ == "__main__":
    sys.exit(main())
