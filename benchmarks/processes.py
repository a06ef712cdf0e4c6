"""Child processes: each bounded in time, and gone at the end whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sides import Side, Workers

PROJECT = Path(__file__).resolve().parent / "project"
PROBE_SECONDS = 1800
DRAIN_SECONDS = 600
STOP_SECONDS = 60
LOOK_SECONDS = 0.25


class Failed(Exception):
    """A child process ended badly or not at all; the message ends with its output."""


def probe(side: Side, place: str, name: str, **arguments: Any) -> Any:
    """Run a probe of ``project/<app>/probes.py`` in a process of its own; give its answer."""
    command = ["probe.py", side.app, name, json.dumps(arguments)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        process = _start(side, place, command, out=out, log=log)
        try:
            code = process.wait(PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
        if code != 0:
            raise Failed(f"{side.title}: {name} gave {code}:\n{_tail(log)}")
        out.seek(0)
        return json.loads(out.read().splitlines()[-1])


def drain(workers: Workers, place: str, count: int, unfinished: Callable[[], int]) -> None:
    """Let ``count`` worker processes work until no job is left."""
    with tempfile.TemporaryFile() as log, _running(workers, place, count, log) as processes:
        end = time.monotonic() + DRAIN_SECONDS
        while not _is_drained(workers, processes, unfinished, log):
            if time.monotonic() > end:
                raise Failed(f"{workers.side.title}: not drained:\n{_tail(log)}")
            time.sleep(LOOK_SECONDS)


def _is_drained(
    workers: Workers,
    processes: Sequence[subprocess.Popen[bytes]],
    unfinished: Callable[[], int],
    log: BinaryIO,
) -> bool:
    ended = [process.returncode for process in processes if process.poll() is not None]
    if any(ended) or (ended and not workers.ends_itself):
        raise Failed(f"{workers.side.title}: a worker ended with {ended}:\n{_tail(log)}")
    if workers.ends_itself:
        return len(ended) == len(processes)
    return unfinished() == 0


@contextmanager
def _running(
    workers: Workers, place: str, count: int, log: BinaryIO
) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    command = ["manage.py", *workers.arguments]
    try:
        for _ in range(count):
            processes.append(_start(workers.side, place, command, out=log, log=log))
        yield processes
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            if process.wait(STOP_SECONDS) != 0:
                raise Failed(f"{workers.side.title}: a worker stopped badly:\n{_tail(log)}")
    finally:
        for process in processes:
            _kill(process)


def _start(
    side: Side, place: str, command: Sequence[str], *, out: BinaryIO, log: BinaryIO
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": side.settings, "DATABASE_URL": place}
    # Its checks cost time.
    environment.pop("PYTHONDEVMODE", None)
    # A session of its own: Ctrl-C is for us, and we end our children.
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=PROJECT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=log,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _tail(log: BinaryIO) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-4000:]
