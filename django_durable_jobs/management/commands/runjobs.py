"""``manage.py runjobs``: parse options, start the worker, give its exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, no_translations

from ...worker.loop import BAD_OPTIONS, DRAINED, GAVE_UP, MIGRATIONS_MISSING
from ...worker.options import InvalidOptions, MigrationsMissing, WorkerOptions, build_options
from ...worker.run import run_worker

LOGGER = "django_durable_jobs"
LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}


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

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        log = _log_to(self.stderr, options["verbosity"])
        try:
            code = self._run(options)
        except InvalidOptions as error:
            raise CommandError(str(error), returncode=BAD_OPTIONS) from error
        except MigrationsMissing as error:
            raise CommandError(str(error), returncode=MIGRATIONS_MISSING) from error
        finally:
            log()
        if code == GAVE_UP and self._owns_process:
            self._leave(code)
        if code != DRAINED:
            sys.exit(code)

    def _run(self, options: dict[str, Any]) -> int:
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
            no_schedules=options["no_schedules"],
        )
        verbosity = options["verbosity"]
        return run_worker(
            asked,
            owns_process=self._owns_process,
            started=lambda one: self._banner(one, verbosity),
        )

    @property
    def _owns_process(self) -> bool:
        return bool(getattr(self, "_called_from_command_line", False))

    def _leave(self, code: int) -> None:
        """Exit without Python's own clean-up, which would wait for threads that never end."""
        self.stdout.flush()
        self.stderr.flush()
        os._exit(code)

    def _banner(self, options: WorkerOptions, verbosity: int) -> None:
        if verbosity < 1:
            return
        queues = "all queues" if options.queues is None else ", ".join(options.queues)
        if options.excluded_queues:
            queues += f" but {', '.join(options.excluded_queues)}"
        processes = 0 if options.until_idle else options.processes
        self.stdout.write(
            f"Worker {options.name} on database {options.alias}: {queues};"
            f" {max(processes, 1)} x {options.threads} slots."
        )
        # Before a fork, which would copy what is buffered, and for whoever reads a pipe.
        self.stdout.flush()


def _log_to(stream: Any, verbosity: int) -> Any:
    """Show the log where the project shows it nowhere; give the undo."""
    logger = logging.getLogger(LOGGER)
    shown = (logging.getLogger(), logger, logging.getLogger(f"{LOGGER}.worker"))
    if any(one.handlers for one in shown):
        return lambda: None
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(LEVELS.get(verbosity, logging.DEBUG))

    def undo() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before)

    return undo
