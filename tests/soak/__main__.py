"""Besiege workers and check what they leave behind: ``python -m tests.soak [--seconds 600]``.

Four worker processes on a PostgreSQL server of their own work while random ones are killed,
stopped and continued, or restarted, while the server is restarted, and while jobs are cancelled.
At the end all is let go; every job must end, and ``history`` judges. A seed repeats the choices.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests._postgres import running

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from django_durable_jobs.models import Job

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (["--processes=0"], ["--processes=0"], ["--processes=2"])
PATIENCE = 120.0
BACKLOG = 400


class Siege:
    """The workers, the server and the jobs of one soak."""

    def __init__(self, server: object, folder: Path, seed: int) -> None:
        from django_durable_jobs.models import Job

        self.jobs = Job.objects
        self.server = server
        self.folder = folder
        self.effects = folder / "effects"
        self.draw = random.Random(seed)  # noqa: S311
        self.submitted: list[str] = []
        self.cancelled: set[str] = set()
        self.deeds: dict[str, int] = {}
        self.stopped: list[tuple[float, int]] = []
        self.workers = [self.start(number) for number in range(len(COMMANDS))]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "django", "runjobs", f"--name=w{number}", "--threads=4"]
        with (self.folder / f"worker-{number}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *COMMANDS[number]],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, seconds: float) -> None:
        deeds = [self.kill] * 3 + [self.halt] * 3 + [self.restart] * 3 + [self.restart_server]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.top_up()
            self.cancel()
            deed = self.draw.choice(deeds)
            deed()
            self.deeds[deed.__name__] = self.deeds.get(deed.__name__, 0) + 1
            self.continue_those_due()
            time.sleep(self.draw.uniform(0.2, 1.2))

    def top_up(self) -> None:
        """Always leave some, and no more than a slow machine works off at the end."""
        if until(lambda: [self.live().count()], "a look")[0] < BACKLOG:
            self.submit(20)

    def live(self) -> QuerySet[Job]:
        from django_durable_jobs import states

        return self.jobs.filter(status__in=states.LIVE)

    def submit(self, count: int) -> None:
        from tests.testapp.jobs import Work, work

        for _ in range(count):
            name = f"job-{len(self.submitted)}"
            payload = Work(
                effects=str(self.effects),
                seconds=self.draw.choice([0.0, 0.02, 0.02, 0.1, 4.0]),
                obedient=self.draw.random() < 0.8,
                failures=0.1,
            )
            # The server may be away, or go away before it has answered: the id makes it safe.
            until(lambda p=payload, n=name: work.submit(p, job_id=n), "a submission")
            self.submitted.append(name)

    def cancel(self) -> None:
        name = self.draw.choice(self.submitted)
        self.cancelled.add(name)
        until(lambda: self.jobs.get(job_id=name).request_cancel(), "a cancel")

    def one(self) -> int:
        return self.draw.randrange(len(self.workers))

    def kill(self) -> None:
        """SIGKILL to a worker or to a supervisor's child."""
        number = self.one()
        worker = self.workers[number]
        victim = self.draw.choice([worker.pid, *children(worker.pid)])
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        if victim == worker.pid:
            worker.wait()
            self.workers[number] = self.start(number)

    def halt(self) -> None:
        """SIGSTOP for less or more than a lease."""
        pid = self.draw.choice([p for w in self.workers for p in [w.pid, *children(w.pid)]])
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.stopped.append((time.monotonic() + self.draw.uniform(0.5, 6), pid))

    def continue_those_due(self, *, all_of_them: bool = False) -> None:
        due = [one for one in self.stopped if all_of_them or one[0] <= time.monotonic()]
        for one in due:
            self.stopped.remove(one)
            with suppress(ProcessLookupError):
                os.kill(one[1], signal.SIGCONT)

    def restart(self) -> None:
        """SIGTERM; what is still stopped then could not obey."""
        self.continue_those_due(all_of_them=True)
        number = self.one()
        self.end(number)
        self.workers[number] = self.start(number)

    def end(self, number: int) -> None:
        worker = self.workers[number]
        worker.send_signal(signal.SIGTERM)
        code = worker.wait(PATIENCE)
        # Before its handlers of signals are there, the signal itself ends it.
        if code not in (0, 4, -signal.SIGTERM):
            raise SystemExit(f"worker {number} ended with {code} after SIGTERM: {self.folder}")

    def restart_server(self) -> None:
        self.server.stop()  # type: ignore[attr-defined]
        time.sleep(self.draw.uniform(0, 4))
        self.server.start()  # type: ignore[attr-defined]

    def let_go(self) -> None:
        """Let every job end, then every worker."""
        self.continue_those_due(all_of_them=True)
        until(lambda: not self.live().exists(), "the last jobs to end")
        for number in range(len(self.workers)):
            self.end(number)

    def kill_all(self) -> None:
        for worker in self.workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()

    def judge(self) -> list[str]:
        from django_durable_jobs.models import JobAttempt

        from .history import effects_in, violations

        return violations(
            self.submitted,
            self.cancelled,
            self.jobs.all(),
            JobAttempt.objects.order_by("job_id", "number"),
            effects_in(self.effects),
        )


def until(work: Callable[[], Any], what: str) -> Any:
    """Repeat until it gives something true, and give that; the database may be away meanwhile."""
    from django.db import DatabaseError, InterfaceError, connection

    from django_durable_jobs import LockTimeout

    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if answer := work():
                return answer
        except (DatabaseError, InterfaceError, LockTimeout):
            connection.close()
        time.sleep(0.05)
    raise SystemExit(f"waited {PATIENCE:g} s for {what}")


def children(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="durable-jobs-soak-"))
    print(f"soak: {options.seconds:g} s, seed {options.seed}, logs in {folder}", flush=True)
    with running() as server:
        os.environ.update(
            DATABASE_URL=server.url,
            TEST_DATABASE="postgres",
            TEST_DATABASE_NAME="postgres",
            DJANGO_SETTINGS_MODULE="tests.soak.settings",
        )
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        siege = Siege(server, folder, options.seed)
        try:
            siege.run(options.seconds)
            siege.let_go()
        finally:
            siege.kill_all()
        broken = siege.judge()
        lost = siege.jobs.filter(attempts__outcome="lost").distinct().count()
        stopped = siege.jobs.filter(attempts__outcome="stopped").distinct().count()
    print(
        f"{len(siege.submitted)} jobs; {siege.deeds}; {lost} lost a lease, {stopped} were stopped"
    )
    for one in broken[:50]:
        print(f"BROKEN: {one}")
    print(f"{len(broken)} promises broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
