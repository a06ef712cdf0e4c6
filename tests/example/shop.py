"""The example shop as its user has it: a copy of the project, real processes, one database.

The suite's own settings and database play no part here. What the processes did is read with
the database's own driver, past Django.
"""

from __future__ import annotations

import csv
import http.client
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.cookies import SimpleCookie
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

from ..worker.support import PATIENCE, until

EXAMPLE = Path(__file__).resolve().parents[2] / "example_project"
# What running the example leaves behind, and what its user may keep beside it.
LEFTOVERS = shutil.ignore_patterns(".*", "__pycache__", "db.sqlite3*", "imports")
# How variables begin that the suite or its machine may have set, and that would change the shop.
NOT_THE_SHOPS = ("DJANGO_", "SHOP_", "TEST_", "DATABASE_URL", "HOST", "PORT")
JOB = "django_durable_jobs_job"
ATTEMPT = "django_durable_jobs_jobattempt"
# The end of each chunk of an import, and what holds it there.
PAUSE = "        time.sleep(payload.pause_seconds)\n"
HOLD = """\
        from pathlib import Path
        while done["rows"] >= int(Path("{file}").read_text()):
            ctx.check()
            time.sleep(0.02)
"""


class Process:
    """A process of the shop, in a session of its own; what it says goes into a file."""

    def __init__(self, arguments: list[str], folder: Path, env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=env,
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

    def kill(self) -> None:
        """SIGKILL to the process and those that it forked: none of them says a last word."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()

    def ends(self) -> int:
        """Wait for the exit code, negative for a signal."""
        try:
            return self.popen.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.output()}") from None

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Shop:
    """One copy of the example with a database of its own."""

    def __init__(self, folder: Path, database_url: str | None) -> None:
        self.folder = folder
        self.logs = folder.with_name(f"{folder.name}-logs")
        self.logs.mkdir()
        shutil.copytree(EXAMPLE, folder, ignore=LEFTOVERS)
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(NOT_THE_SHOPS)
        }
        self.environment["PYTHONWARNINGS"] = "error"
        # As in a terminal that was used for another project.
        self.environment["DJANGO_SETTINGS_MODULE"] = "another.settings"
        self.processes: list[Process] = []
        self.database_url = database_url or sqlite_url(folder / "db.sqlite3")
        if database_url:
            self.environment["DATABASE_URL"] = database_url

    def change(self, file: str, before: str, after: str) -> None:
        """Break something in this copy of the project."""
        path = self.folder / file
        text = path.read_text()
        assert text.count(before) == 1, f"{file} holds {text.count(before)} of {before!r}"
        path.write_text(text.replace(before, after))

    def hold_import_at(self, rows: int) -> None:
        """Let imports write so many rows, and then wait for more, or for somebody to stop them."""
        file = self.folder / "hold_at"
        if not file.exists():
            self.change("shop/jobs.py", PAUSE, PAUSE + HOLD.format(file=file))
        new = file.with_name("hold_at.new")
        new.write_text(str(rows))
        new.replace(file)

    def start(self, *arguments: str, **variables: str) -> Process:
        log = self.logs / f"{len(self.processes)}.log"
        env = {**self.environment, **variables}
        process = Process(list(arguments), self.folder, env, log)
        self.processes.append(process)
        return process

    def work(self, *arguments: str, **variables: str) -> Process:
        """Start the worker."""
        return self.start("manage.py", "runjobs", *arguments, **variables)

    def python(self, code: str, **variables: str) -> str:
        """Run code with the project set up; give what it printed."""
        setup = (
            "import os, django; os.environ['DJANGO_SETTINGS_MODULE'] = 'config.settings';"
            " django.setup()\n"
        )
        process = self.start("-c", setup + code, **variables)
        assert process.ends() == 0, process.output()
        return process.output()

    def end(self) -> None:
        """Nothing that works in this shop outlives its test, whoever started it."""
        for process in self.processes:
            process.kill()
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def alive(self) -> list[int]:
        """Give the processes that were started in this copy of the project."""
        return [pid for pid in processes() if works_in(pid, self.folder)]

    # What the database holds

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        if self.database_url.startswith("sqlite:///"):
            path = unquote(self.database_url.removeprefix("sqlite:///"))
            with closing(sqlite3.connect(path, timeout=20)) as lite:
                return lite.execute(query).fetchall()
        import psycopg

        with psycopg.connect(self.database_url) as server:
            return server.execute(query).fetchall()

    def row(self, query: str) -> tuple[Any, ...]:
        (row,) = self.rows(query)
        return row

    def value(self, query: str) -> Any:
        (value,) = self.row(query)
        return value

    def count(self, table: str) -> int:
        return self.value(f"SELECT count(*) FROM {table}")


def sqlite_url(file: Path) -> str:
    """Give the address of a file, whatever characters its path has."""
    return f"sqlite:///{quote(str(file))}"


def processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").glob("[0-9]*"))


def works_in(pid: int, folder: Path) -> bool:
    """Tell whether a living process has its working directory there."""
    try:
        # Empty for a zombie, whose directory cannot be read either.
        return Path(os.readlink(f"/proc/{pid}/cwd")) == folder
    except OSError:
        return False


# The real import


@dataclass
class Import:
    """An import that was started, as the rows show it."""

    shop: Shop
    pk: int

    def job(self, *columns: str) -> tuple[Any, ...]:
        return self.shop.row(f"SELECT {', '.join(columns)} FROM {JOB} WHERE id = {self.pk}")

    def status(self) -> str:
        return self.job("status")[0]

    def ended(self) -> bool:
        return self.job("finished_at")[0] is not None

    def attempts(self, *columns: str) -> list[tuple[Any, ...]]:
        return self.shop.rows(
            f"SELECT {', '.join(columns)} FROM {ATTEMPT} WHERE job_id = {self.pk} ORDER BY number"
        )

    def chunks(self) -> list[tuple[int, int, int]]:
        """Give (first row, rows, attempt) of each chunk that was written."""
        (job_id,) = self.job("job_id")
        return self.shop.rows(
            "SELECT first_row, rows, attempt FROM shop_importedchunk"
            f" WHERE job_id = '{job_id}' ORDER BY first_row"
        )

    def written(self) -> int:
        """Give the number of rows; fail if a row was written twice or left out before others."""
        total = 0
        for first_row, rows, _ in self.chunks():
            assert first_row == total, self.chunks()
            total += rows
        return total

    def checkpoint(self) -> int:
        (text,) = self.job("checkpoint")
        return json.loads(text)["rows"]

    def expire_lease(self) -> None:
        """Let the lease of a dead worker be over now, not in a minute."""
        self.shop.python(
            "from django_durable_jobs.models import Job\n"
            "from django_durable_jobs.testing import expire_lease\n"
            f"expire_lease(Job.objects.get(pk={self.pk}))"
        )

    def reaches(self, rows: int) -> None:
        until(lambda: self.written() >= rows, f"{rows} rows to be written")


def start_import(shop: Shop, pause_seconds: float) -> Import:
    """Start the import of the packaged list; the pause comes after each of its chunks."""
    code = (
        f"from shop import services\nprint(services.start_import(pause_seconds={pause_seconds}).pk)"
    )
    return Import(shop, int(shop.python(code)))


def packaged_rows() -> int:
    """Count the rows of the list that the shop imports, in a way of our own."""
    with (resources.files("airportsdata") / "airports.csv").open(encoding="utf-8") as file:
        return sum(1 for _ in csv.reader(file)) - 1


# The pages


@dataclass
class Answer:
    status: int
    text: str
    location: str

    def json(self) -> Any:
        return json.loads(self.text)


class Browser:
    """As much of a browser as the pages need: cookies, forms, and the token in them."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.cookies: dict[str, str] = {}

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def submit(self, path: str, page: str | None = None, **fields: str) -> Answer:
        """Post the form that ``page`` shows (the same address unless given)."""
        assert self.get(page or path).status == 200
        body = urlencode({**fields, "csrfmiddlewaretoken": self.cookies["csrftoken"]})
        return self.ask("POST", path, body, {"Content-Type": "application/x-www-form-urlencoded"})

    def ask(
        self, method: str, path: str, body: str = "", headers: dict[str, str] | None = None
    ) -> Answer:
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        sent = {"Cookie": cookie} if cookie else {}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as line:
            line.request(method, path, body or None, {**sent, **(headers or {})})
            with closing(line.getresponse()) as response:
                for header in response.headers.get_all("Set-Cookie", []):
                    for name, morsel in SimpleCookie(header).items():
                        self.cookies[name] = morsel.value
                location = response.headers.get("Location", "")
                return Answer(response.status, response.read().decode(), location)


def free_port() -> int:
    """Give a port below those that the system hands out, to listen on in a few seconds."""
    draw = random.SystemRandom()
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := draw.randrange(15_000, 32_000)))
            return port


def opens(browser: Browser, process: Process) -> None:
    """Wait until the shop's server answers."""

    def answers() -> bool:
        assert process.popen.poll() is None, process.output()
        try:
            return browser.get("/").status == 200
        except OSError:
            return False

    until(answers, "the shop to open")


@contextmanager
def open_shop(shop: Shop) -> Iterator[Browser]:
    """Serve the pages, without a worker."""
    port = free_port()
    web = shop.start("manage.py", "serve_web", f"127.0.0.1:{port}")
    browser = Browser(port)
    opens(browser, web)
    yield browser
    web.send()
    assert web.ends() == 0, web.output()


NewShop = Callable[..., Shop]
