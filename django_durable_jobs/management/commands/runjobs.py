"""``manage.py runjobs``: parse options, start the worker, give its exit code."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, no_translations

from ...worker.log import FORMATS, show_log
from ...worker.loop import BAD_OPTIONS, DRAINED, GAVE_UP, MIGRATIONS_MISSING
from ...worker.options import InvalidOptions, MigrationsMissing, WorkerOptions, build_options
from ...worker.run import run_worker
from ...worker.signals import Stop, stop_on_signal


class Command(BaseCommand):
    help = "Run durable jobs until SIGTERM or SIGINT."
    # A bad setting is told in one sentence with exit code 2 instead.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--queues", help="Serve these queues only; names with commas between.")
        parser.add_argument("--exclude-queues", help="Serve all queues but these.")
        parser.add_argument(
            "--processes",
            type=int,
            help="Worker processes under a supervisor; 0 (and --drain, --once): in this process.",
        )
        parser.add_argument("--threads", type=int, help="Handlers that run at a time per process.")
        parser.add_argument("--name", help="The worker's name, as attempts record it.")
        parser.add_argument("--database", help="The alias of the jobs' database.")
        parser.add_argument("--max-jobs", type=int, help="End after so many jobs.")
        parser.add_argument("--no-schedules", action="store_true", help="Fire no schedules.")
        parser.add_argument(
            "--drain", action="store_true", help="End once nothing that it may run is due."
        )
        parser.add_argument(
            "--once", action="store_true", help="Make one pass with one claim, finish it and end."
        )
        parser.add_argument(
            "--max-runtime", type=float, metavar="SECONDS", help="Replace a process after so long."
        )
        parser.add_argument(
            "--max-memory", type=int, metavar="MIB", help="Replace a process that uses more."
        )
        parser.add_argument(
            "--heartbeat-file", metavar="PATH", help="Touch this file while all is well."
        )
        parser.add_argument(
            "--reload",
            action="store_true",
            help="Begin again when the code changes, in one process (for development).",
        )
        parser.add_argument(
            "--log-format",
            choices=FORMATS,
            help="Log to stderr as this, whatever the project's LOGGING says.",
        )

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        hide_log = show_log(self._write_line, options["verbosity"], options["log_format"])
        try:
            # Before all else: a signal during the start is obeyed as a later one is.
            with stop_on_signal(for_good=self._owns_process) as stop:
                code = self._run(options, stop)
        except InvalidOptions as error:
            raise CommandError(str(error), returncode=BAD_OPTIONS) from error
        except MigrationsMissing as error:
            raise CommandError(str(error), returncode=MIGRATIONS_MISSING) from error
        finally:
            hide_log()
        if code == GAVE_UP and self._owns_process:
            self._leave(code)
        if code != DRAINED:
            sys.exit(code)

    def _run(self, options: dict[str, Any], stop: Stop) -> int:
        asked = build_options(
            database=options["database"],
            name=options["name"],
            queues=options["queues"],
            exclude_queues=options["exclude_queues"],
            processes=options["processes"],
            threads=options["threads"],
            drain=options["drain"],
            once=options["once"],
            max_jobs=options["max_jobs"],
            max_runtime=options["max_runtime"],
            max_memory=options["max_memory"],
            heartbeat_file=options["heartbeat_file"],
            reload=options["reload"],
            no_schedules=options["no_schedules"],
        )
        verbosity = options["verbosity"]
        return run_worker(
            asked,
            owns_process=self._owns_process,
            started=lambda one: self._banner(one, verbosity),
            stop=stop,
        )

    @property
    def _owns_process(self) -> bool:
        return bool(getattr(self, "_called_from_command_line", False))

    def _write_line(self, text: str) -> None:
        # Uncoloured: it is no error.
        self.stderr.write(text, str, ending="")
        self.stderr.flush()

    def _leave(self, code: int) -> None:
        """Exit without Python's own clean-up, which would wait for threads that never end."""
        self.stdout.flush()
        self.stderr.flush()
        os._exit(code)

    def _banner(self, options: WorkerOptions, verbosity: int) -> None:
        if verbosity < 1:
            return
        self.stdout.write(options.banner)
        # Before a fork, which would copy what is buffered, and for whoever reads a pipe.
        self.stdout.flush()
