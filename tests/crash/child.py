"""Lives of workers that are killed at each of their database statements in turn.

    python -m tests.crash.child FOLDER KIND

KIND is a kind of death:

before, after   SIGKILL before (after) the n-th statement of one of the worker's threads; n
                counts up until lives end by themselves, for each thread that has any.
moves           SIGKILL before and after the first statement of each kind of move.
again           SIGKILL after the n-th statement of the worker, and its next lives there too.
server          PostgreSQL only: the worker's session stops in the middle of a statement
                that moves rows; then its process is killed, and the session too or not.

A statement that only reads leaves the tables as they are, and a death between two writes of
a transaction is one after the first. So "after" counts what writes, and "before" counts what
comes first after a commit (and before all). CRASH_EVERY_STATEMENT=1 lets each statement count.

This process stays single-threaded and without open connections, so that what it forks
starts at once and clean. For each life it forks a director, alone on a database, which
submits the jobs, forks the worker that dies, ends its leases, forks a worker that drains,
and writes what the tables held into FOLDER, one JSON file for each life.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import django

LIVES_AT_ONCE = 8
# A life is over long before; what is not, has gone wrong.
LIFE_SECONDS = 300
MOST_STATEMENTS = 600
SURVIVORS = 2
RESTARTS = 4
STEP = {"again": 5}
LOCK = 4711
EVERY_STATEMENT = bool(os.environ.get("CRASH_EVERY_STATEMENT"))
WRITES = re.compile(r"\bINSERT\b|\bDELETE\b|(?<!FOR )\bUPDATE\b")
# Enough for whatever a machine under load loses, and few enough to run out of.
MAX_ATTEMPTS = {"again": 2}
# Renewed as a short lease is, though none is over before the worker is dead.
RENEWAL_SECONDS = 0.4

# Each kind of write, told by what its statement holds.
MOVES = {
    "claim": ("INSERT INTO django_durable_jobs_jobattempt",),
    "renew": ("lease_expires_at = o.now + o.lease",),
    "finish": ("o.final_status",),
    "complete": ("SET", "status = 'succeeded', outcome = 'returned'"),
    "progress": ("progress = o.fraction",),
    "checkpoint": ("checkpoint = o.value",),
    "block a claimed one": ("DELETE FROM django_durable_jobs_jobattempt",),
    "recover": ("outcome = 'lost'", "django_durable_jobs_jobattempt SET"),
    "promote": ("SET status = 'queued' WHERE status", "= 'scheduled'"),
    "exhaust": ("error_category = 'exhausted'", "SET status = 'failed'"),
    "release": ("blocked_reason = NULL",),
    "block": ("SET status = 'blocked'",),
    "stage": ("INSERT INTO django_durable_jobs_job (",),
    "cancel": ('"cancel_requested_at" = COALESCE',),
    "business": ('INSERT INTO "testapp_business"',),
}


# -- the jobs


def register_handlers() -> None:
    from django.db import transaction

    from django_durable_jobs import job
    from django_durable_jobs.models import Job
    from tests.testapp.models import Business

    def wait_for_renewal(name: str) -> None:
        """Return once the lease was prolonged."""
        leases = Job.objects.filter(job_id=name).values_list("lease_expires_at", flat=True)
        first = leases.get()
        wait(lambda: leases.get() != first, pause=0.03)

    @job("crash.work", backoff=0)
    def work(ctx) -> int:
        """Write a business row and a job with an id of its own; fail once, then succeed."""
        with transaction.atomic():
            Business.objects.create(name=ctx.token, value=ctx.attempt)
            Job.objects.stage("crash.follow", job_id="followed")
        ctx.progress(0.5, "half")
        if ctx.checkpoint_value is None:
            wait_for_renewal(ctx.job_id)
            ctx.checkpoint("failed once")
            raise ValueError("on purpose")
        return ctx.attempt

    @job("crash.cancelled", backoff=0)
    def cancelled(ctx) -> None:
        """Ask for the own cancel, and obey it once the worker passes it on."""
        Job.objects.get(job_id=ctx.job_id).request_cancel()
        while True:
            ctx.check()
            time.sleep(0.005)

    def tell(event) -> None:
        """Write what commits with the end, in the worker's transaction or the handler's."""
        Business.objects.create(name=f"told of {event.job_id}", value=event.attempt)

    @job("crash.fragile", retry_on_interrupt=False, on_finish=tell)
    def fragile(ctx) -> int:
        Business.objects.create(name=ctx.token, value=ctx.attempt)
        return ctx.attempt

    @job("crash.complete", backoff=0, on_finish=tell)
    def complete(ctx) -> None:
        """Write a business row and the job's end in one transaction."""
        with transaction.atomic():
            Business.objects.create(name=ctx.token, value=ctx.attempt)
            ctx.complete(ctx.attempt)

    @job("crash.follow", max_attempts=9)
    def follow(ctx) -> int:
        return ctx.attempt


def submit_jobs(*, max_attempts: int) -> None:
    """One job for each move of a worker; what needs a past gets it by hand."""
    from django_durable_jobs import states
    from django_durable_jobs.models import Job
    from django_durable_jobs.transitions.claims import claim, queued_lanes

    def submit(handler: str, name: str) -> None:
        Job.objects.submit(f"crash.{handler}", job_id=name, max_attempts=max_attempts)

    def change(name: str, **columns: Any) -> None:
        assert Job.objects.filter(job_id=name).update(**columns) == 1

    submit("follow", "lost")
    (lost,) = claim("default", queued_lanes("default"), limit=1, worker="dead", lease_seconds=600)
    change("lost", lease_expires_at=lost.claimed_at)
    for name in ("work", "cancelled", "fragile", "complete"):
        submit(name, name)
    for name in ("corrupt", "exhausted", "released", "foreign"):
        submit("follow", name)
    change("corrupt", payload_sha256="0" * 64)
    change("exhausted", max_attempts=1, attempt_count=1)
    change("released", status=states.BLOCKED, blocked_reason=states.UNKNOWN_HANDLER)
    change("foreign", handler="crash.nobody")


def empty_tables() -> None:
    from django_durable_jobs.models import Job
    from tests.testapp.models import Business

    Job.objects.all().delete()
    Business.objects.all().delete()


def tables() -> dict[str, Any]:
    """What the tables held at one instant, for the test to judge."""
    from django.db import connection, transaction

    from django_durable_jobs.models import Job, JobAttempt
    from tests.testapp.models import Business

    with transaction.atomic():
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        return {
            "jobs": list(Job.objects.order_by("id").values()),
            "attempts": list(JobAttempt.objects.order_by("job_id", "number").values()),
            "business": list(Business.objects.order_by("id").values("name", "value")),
        }


# -- the worker, and its death


@dataclass(frozen=True, kw_only=True)
class Death:
    """Kill this process before (after) the n-th statement of a thread (None: of all)."""

    when: str
    number: int
    note: Path
    thread: str | None = None
    texts: tuple[str, ...] = ()


class Killer:
    """Counts the statements of this process's connections, and ends it at one of them."""

    def __init__(self, death: Death) -> None:
        self._death = death
        self._lock = threading.Lock()
        self.counted: Counter[str] = Counter()

    def watch(self, connection: Any, **kwargs: Any) -> None:
        if self not in connection.execute_wrappers:
            connection.execute_wrappers.append(self)

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        with self._lock:
            mine = self._is_the_one(context["connection"], sql)
        if mine and self._death.when == "before":
            self._kill(sql)
        try:
            return execute(sql, params, many, context)
        finally:
            if mine:
                self._kill(sql)

    def _is_the_one(self, connection: Any, sql: str) -> bool:
        name = threading.current_thread().name
        death = self._death
        if death.texts:
            return all(text in sql for text in death.texts)
        if not self._counts(connection, sql):
            return False
        self.counted[name] += 1
        number = self.counted.total() if death.thread is None else self.counted[name]
        return number == death.number and death.thread in (name, None)

    def _counts(self, connection: Any, sql: str) -> bool:
        writes = WRITES.search(sql) is not None
        # None: this connection has not written yet; True: it has, and maybe not committed.
        wrote = getattr(connection, "has_written", None)
        follows = wrote is True and not connection.in_atomic_block
        if writes or follows:
            connection.has_written = writes
        if EVERY_STATEMENT:
            return True
        if self._death.when == "after":
            return writes
        return follows or (writes and wrote is None)

    def _kill(self, sql: str) -> None:
        self._death.note.write_text(f"{threading.current_thread().name}: {sql}")
        os.kill(os.getpid(), signal.SIGKILL)
        # Until the signal is delivered nothing else may come to the database.
        time.sleep(LIFE_SECONDS)


def run_worker(death: Death | None) -> int:
    """Drain; one that survived its death notes how many statements its threads had."""
    from django.db.backends.signals import connection_created

    from django_durable_jobs.worker.heartbeat import Heartbeat
    from django_durable_jobs.worker.loop import Worker
    from django_durable_jobs.worker.options import build_options

    Heartbeat.interval = lambda self: RENEWAL_SECONDS  # type: ignore[method-assign]
    name = "clean" if death is None else "mortal"
    worker = Worker(build_options(drain=True, threads=1, name=name))
    if death is None:
        return worker.run()
    killer = Killer(death)
    connection_created.connect(killer.watch)
    status = worker.run()
    death.note.write_text(json.dumps(killer.counted))
    return status


def forked(work: Callable[[], int]) -> int:
    """Run ``work`` in a child; give its pid. The child is gone in bounded time."""
    from django_durable_jobs.worker.connections import close_before_fork

    close_before_fork()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        signal.alarm(LIFE_SECONDS)
        status = work()
    except BaseException:
        logging.getLogger(__name__).critical("a child failed", exc_info=True)
    finally:
        os._exit(status)


def ended(pid: int) -> int:
    """Wait for a child; give its exit status, below 0 for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- one life


def live(kind: str, death: Death) -> dict[str, Any]:
    """Die at one statement (with ``again``: several times), then be drained."""
    submit_jobs(max_attempts=MAX_ATTEMPTS.get(kind, 9))
    started = tables()
    exits = []
    for _ in range(RESTARTS if kind == "again" else 1):
        exits.append(ended(forked(lambda: run_worker(death))))
        wait_for_sessions()
        killed = tables()
        if exits[-1] != -signal.SIGKILL:
            break
        end_leases()
    return {
        "thread": death.thread,
        "number": death.number,
        "exits": exits,
        "note": death.note.read_text(),
        "started": started,
        "killed": killed,
        **drained(),
    }


def drained() -> dict[str, Any]:
    """Drain with a clean worker."""
    end_leases()
    return {"drained_exit": ended(forked(lambda: run_worker(None))), "ended": tables()}


def wait_for_sessions() -> None:
    """Return once the server has noticed that the killed worker's sessions are gone."""
    from django.db import connection

    def left() -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
            return cursor.fetchone()[0]

    if connection.vendor == "postgresql":
        wait(lambda: not left())


def end_leases() -> None:
    """Let the leases be over now: whoever held them is dead."""
    from django_durable_jobs.models import Job
    from django_durable_jobs.testing import expire_lease

    for job in Job.objects.filter(status="running"):
        expire_lease(job)


def wait(condition: Callable[[], bool], *, pause: float = 0.01) -> None:
    end = time.monotonic() + LIFE_SECONDS / 2
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(pause)


# -- a session that stops in the middle of a statement

_RUNNING = "OLD.status = 'running' AND NEW.status"
# Where: the trigger's time, event and table, and the rows that it is for.
STOPS = {
    "claim, at the job": ("AFTER UPDATE", "job", "OLD.status = 'queued' AND NEW.status = 'running'"
              ),
    "claim, at the attempt": ("BEFORE INSERT", "jobattempt", "true"),
    "finish, at the job": ("AFTER UPDATE", "job", f"{_RUNNING} <> 'running'"),
    "finish, at the attempt": ("BEFORE UPDATE", "jobattempt", "NEW.outcome <> 'lost'"),
    "complete": ("BEFORE UPDATE", "jobattempt", "NEW.status = 'succeeded'"),
    "retry": ("AFTER UPDATE", "job", f"{_RUNNING} = 'scheduled'"),
    "cancel": ("BEFORE UPDATE", "jobattempt", "NEW.status = 'cancelled'"),
    "renew": ("AFTER UPDATE", "job", f"{_RUNNING} = 'running' AND NEW.progress = OLD.progress"
              " AND NEW.lease_expires_at <> OLD.lease_expires_at"),
    "progress": ("AFTER UPDATE", "job", f"{_RUNNING} = 'running' AND NEW.progress > OLD.progress"),
    "recover, at the attempt": ("BEFORE UPDATE", "jobattempt", "NEW.outcome = 'lost'"),
    "recover, at the job": ("AFTER UPDATE", "job", "NEW.error_category = 'lost'"),
    "promote": ("AFTER UPDATE", "job", "OLD.status = 'scheduled' AND NEW.status = 'queued'"),
    "exhaust": ("AFTER UPDATE", "job", "NEW.error_category = 'exhausted'"),
    "release": ("AFTER UPDATE", "job", "OLD.status = 'blocked' AND NEW.status = 'queued'"),
    "block": ("AFTER UPDATE", "job", "OLD.status = 'queued' AND NEW.status = 'blocked'"),
    "block a claimed one": ("BEFORE DELETE", "jobattempt", "true"),
}  # fmt: skip


def live_until_stop(where: str, *, terminate: bool) -> dict[str, Any]:
    """Kill the worker while its session stands in a move; end the session too, or let it go on."""
    submit_jobs(max_attempts=9)
    started = tables()
    with trigger(*STOPS[where]), held_lock() as server:
        worker = forked(lambda: run_worker(None))
        wait(lambda: bool(waiting_sessions(server)))
        stopped = tables()
        os.kill(worker, signal.SIGKILL)
        if terminate:
            for pid in waiting_sessions(server):
                server.execute("SELECT pg_terminate_backend(%s)", [pid])
        exits = [ended(worker)]
        if terminate:
            wait(lambda: not waiting_sessions(server))
    wait_for_sessions()
    killed = tables()
    return {
        "where": where,
        "terminate": terminate,
        "exits": exits,
        "started": started,
        "stopped": stopped,
        "killed": killed,
        **drained(),
    }


@contextmanager
def trigger(event: str, table: str, condition: str) -> Iterator[None]:
    """Let rows of a move wait for the lock that the director holds."""
    from django.db import connection

    name = f"django_durable_jobs_{table}"
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE OR REPLACE FUNCTION stand_still() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN PERFORM pg_advisory_xact_lock({LOCK});"
            " IF TG_OP = 'DELETE' THEN RETURN OLD; END IF; RETURN NEW; END $$"
        )
        cursor.execute(
            f"CREATE TRIGGER stand_still {event} ON {name} FOR EACH ROW"
            f" WHEN ({condition}) EXECUTE FUNCTION stand_still()"
        )
    try:
        yield
    finally:
        wait_for_sessions()
        with connection.cursor() as cursor:
            cursor.execute(f"DROP TRIGGER stand_still ON {name}")


@contextmanager
def held_lock() -> Iterator[Any]:
    """Hold the lock on a session that Django does not know, so that no fork closes it."""
    import psycopg
    from django.db import connection

    parameters = connection.get_connection_params()
    wanted = {key: parameters[key] for key in ("dbname", "user", "password", "host", "port")}
    with psycopg.connect(**wanted, autocommit=True) as server:
        server.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        yield server


def waiting_sessions(server: Any) -> list[int]:
    found = server.execute(
        "SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
        " WHERE l.locktype = 'advisory' AND NOT l.granted AND d.datname = current_database()"
    )
    return [row[0] for row in found.fetchall()]


# -- all lives of one kind


def make_template(folder: Path) -> str:
    """Make the database that each life gets a copy of; the tables are those of the suite."""
    from django.core.management import call_command
    from django.db import connection

    name = str(folder / "template.sqlite3")
    if connection.vendor == "postgresql":
        name = f"{prefix()}template"
        with connection.cursor() as cursor:
            cursor.execute(f'CREATE DATABASE "{name}"')
    use(name)
    call_command("migrate", run_syncdb=True, verbosity=0)
    if connection.vendor == "sqlite":
        # What the log still holds would not be copied with the file.
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return name


def prefix() -> str:
    return f"crash_{os.getpid()}_"


def use(name: str) -> None:
    """Let this process, and what it forks, work in that database."""
    from django.db import connection, connections

    connection.close()
    connections.settings["default"]["NAME"] = name
    connection.settings_dict["NAME"] = name


class Databases:
    """A database for each director at work: copies of the template, dropped at the end."""

    def __init__(self, folder: Path) -> None:
        from django.db import connection

        self._postgres = connection.vendor == "postgresql"
        self._home = str(connection.settings_dict["NAME"])
        self._template = make_template(folder)
        self._made: list[str] = [self._template]
        self._free: list[str] = []
        use(self._home)

    def take(self) -> str:
        """Give one that nobody uses; what it holds is deleted by who gets it."""
        if self._free:
            return self._free.pop()
        name = f"{self._template}{len(self._made)}"
        if self._postgres:
            self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{self._template}"')
        else:
            shutil.copy(self._template, name)
        self._made.append(name)
        return name

    def give_back(self, name: str) -> None:
        self._free.append(name)

    def drop(self) -> None:
        for name in self._made:
            if self._postgres:
                self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
            else:
                for file in Path(name).parent.glob(f"{Path(name).name}*"):
                    file.unlink()

    def _execute(self, sql: str) -> None:
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute(sql)
        # Nothing open may be forked.
        connection.close()


@dataclass(kw_only=True)
class Life:
    """What a director does, and where its record goes."""

    place: int
    thread: str | None
    work: Callable[[], dict[str, Any]]
    database: str = ""


class Lives:
    """All lives of one kind, one after another; what ends them is learnt on the way."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._threads: list[str | None] = []
        self._place = 0
        self._survived: Counter[str | None] = Counter()

    def __iter__(self) -> Iterator[Life]:
        if self._kind == "server":
            for where in STOPS:
                for terminate in (True, False):
                    work = partial(live_until_stop, where, terminate=terminate)
                    yield self._life(None, work)
            return
        if self._kind == "moves":
            for texts in MOVES.values():
                yield self._mortal(None, 0, "before", texts)
                yield self._mortal(None, 0, "after", texts)
            return
        when = "before" if self._kind == "before" else "after"
        if self._kind == "again":
            self._threads = [None]
        else:
            # Nobody dies: says which threads there are.
            yield self._mortal(None, 0, when)
        for number in range(1, MOST_STATEMENTS, STEP.get(self._kind, 1)):
            for thread in self._threads:
                # More than one: the number of statements depends on the renewals.
                if self._survived[thread] < SURVIVORS:
                    yield self._mortal(thread, number, when)
            if all(self._survived[thread] >= SURVIVORS for thread in self._threads):
                return

    def _mortal(
        self, thread: str | None, number: int, when: str, texts: tuple[str, ...] = ()
    ) -> Life:
        note = self._folder / f"{self._place}.note"
        death = Death(when=when, number=number, note=note, thread=thread, texts=texts)
        return self._life(thread, partial(live, self._kind, death))

    def _life(self, thread: str | None, work: Callable[[], dict[str, Any]]) -> Life:
        self._place += 1
        return Life(place=self._place - 1, thread=thread, work=work)

    def ended(self, life: Life) -> None:
        record = json.loads((self._folder / f"{life.place}.json").read_text())
        if record["exits"][-1] < 0:
            return
        self._survived[life.thread] += 1
        if not self._threads:
            self._threads = list(json.loads(record["note"]))


def run_all(folder: Path, kind: str) -> None:
    """Fork a director for each life, some at once."""
    databases = Databases(folder)
    lives = Lives(folder, kind)
    running: dict[int, Life] = {}

    def reap() -> None:
        pid, status = os.wait()
        life = running.pop(pid)
        databases.give_back(life.database)
        if status:
            raise SystemExit(f"life {life} went wrong: status {status}")
        lives.ended(life)

    try:
        for life in lives:
            life.database = databases.take()
            running[direct(folder, life)] = life
            # The first alone: the others depend on it.
            while running and (
                (life.place == 0 and kind != "server") or len(running) >= LIVES_AT_ONCE
            ):
                reap()
        while running:
            reap()
    finally:
        databases.drop()


def direct(folder: Path, life: Life) -> int:
    def work() -> int:
        began = time.monotonic()
        use(life.database)
        empty_tables()
        record = life.work() | {"seconds": time.monotonic() - began}
        (folder / f"{life.place}.json").write_text(json.dumps(record, default=str))
        return 0

    return forked(work)


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    django.setup()
    logging.disable(logging.ERROR)
    register_handlers()
    # What a forked process does not touch stays shared with this one.
    gc.freeze()
    run_all(folder, kind)


if __name__ == "__main__":
    main()
