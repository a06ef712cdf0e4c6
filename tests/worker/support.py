"""Worker processes, gates between them and the tests, and waiting for what must come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, connections

from django_durable_jobs import FinishEvent
from django_durable_jobs.models import Job, JobAttempt
from django_durable_jobs.worker.loop import Worker
from django_durable_jobs.worker.options import build_options

from ..testapp.models import Business

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0

# Leases that a test can wait for, where none has to last: a slow machine may stand still that
# long. On SQLite every attempt ends before its lease does.
SHORT = {"LEASE_SECONDS": 3.0, "TIMEOUT_SECONDS": 20, "POLL_SECONDS": 0.05}
if connection.vendor == "sqlite":
    SHORT |= {"TIMEOUT_SECONDS": 2.8}
QUICK = {"LEASE_SECONDS": 60, "TIMEOUT_SECONDS": 20, "POLL_SECONDS": 0.05}

only_where_rows_are_locked = pytest.mark.skipif(
    connection.vendor != "postgresql",
    reason="on SQLite the transaction is the one writer: it meets no lock",
)


def until(condition: Callable[[], Any], what: str = "it", patience: float = PATIENCE) -> Any:
    """Give the first true answer of ``condition``; fail once the patience is over."""
    end = time.monotonic() + patience
    while not (answer := condition()):
        assert time.monotonic() < end, f"waited {patience:g} s for {what}"
        time.sleep(0.01)
    return answer


class Gate:
    """Files by which a handler says that it has begun, and waits until it may go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def payload(self, name: str) -> dict[str, str]:
        return {"folder": str(self.folder), "name": name}

    def begun(self, name: str, attempt: int = 1) -> str:
        """Wait for the handler of an attempt; give what it wrote."""
        path = self.folder / f"{name}.{attempt}.begun"
        return until(lambda: path.exists() and path.read_text(), f"{path.name} to exist")

    def has_begun(self, name: str, attempt: int = 1) -> bool:
        return (self.folder / f"{name}.{attempt}.begun").exists()

    def open(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()


class Process:
    """One ``runjobs`` process."""

    def __init__(
        self, environment: dict[str, str], arguments: list[str], log: Path, module: str = "django"
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, "runjobs", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def send(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def send_group(self, number: int) -> None:
        os.killpg(self.popen.pid, number)

    def ends(self, patience: float = PATIENCE) -> int:
        """Wait for the exit code, negative for a signal."""
        try:
            return self.popen.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.output()}") from None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        return children_of(self.pid)

    def end_now(self) -> None:
        """End the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


def children_of(parent: int) -> list[int]:
    processes = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in processes if parent_of(pid) == parent]


def parent_of(pid: int) -> int | None:
    """Give the parent of a living process; None for one that is gone or a zombie."""
    try:
        # The name in parentheses may hold anything, also blanks.
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)


def processor_seconds(pid: int) -> float:
    """Give what a living process has computed so far, in and outside of the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int) -> bool:
    return parent_of(pid) is not None


def is_buried(pid: int) -> bool:
    """Tell whether a process has ended and its parent has taken note of that."""
    return not Path(f"/proc/{pid}").exists()


def environment_with(
    environment: dict[str, str], durable_jobs: dict[str, Any], **variables: str
) -> dict[str, str]:
    return {
        **environment,
        "DJANGO_SETTINGS_MODULE": "tests.worker.settings_short",
        "TEST_DURABLE_JOBS": json.dumps(durable_jobs),
        **variables,
    }


def drain(*arguments: str, threads: int = 1) -> None:
    """Drain in this process, by the command itself."""
    call_command("runjobs", "--drain", f"--threads={threads}", *arguments, verbosity=0)


class Background:
    """Something that runs in a thread, whose end and error the test waits for."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def ends(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it did not end"
        if self._error is not None:
            raise self._error
        return self._result


class Serving:
    """A worker that serves in this process until the test stops it."""

    def __init__(self, *, threads: int = 2, owns_process: bool = False) -> None:
        options = build_options(processes=0, threads=threads)
        self.worker = Worker(options, owns_process=owns_process)
        self._running = Background(self.worker.run)

    def loop(self, name: str) -> Any:
        (found,) = [one for one in self.worker._loops if one.name == name]
        return found

    def stop(self) -> int:
        self.worker.stop()
        return self._running.ends()


class Recorder:
    """An ``on_finish`` that notes each event and writes a row beside it."""

    def __init__(self) -> None:
        self.events: list[FinishEvent] = []

    def __call__(self, event: FinishEvent) -> None:
        self.events.append(event)
        Business.objects.create(name=f"{event.job_id}: {event.status}", value=event.attempt)


def fresh(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def attempts(job: Job) -> list[JobAttempt]:
    return list(JobAttempt.objects.filter(job=job).order_by("number"))


def only_attempt(job: Job) -> JobAttempt:
    (attempt,) = attempts(job)
    return attempt


def row(job: Job) -> tuple[Any, ...]:
    """Give the job's row and its attempts' rows, whole, to compare them."""
    return (
        list(Job.objects.filter(pk=job.pk).values_list()),
        list(JobAttempt.objects.filter(job=job).order_by("number").values_list()),
    )


def change(job: Job, **columns: Any) -> None:
    """Change columns past every rule, as an import or damage does."""
    assert Job.objects.filter(pk=job.pk).update(**columns) == 1


def database_now() -> int:
    from django_durable_jobs.dialects import dialect_for

    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {dialect_for('default').now()}")
        return cursor.fetchone()[0]
