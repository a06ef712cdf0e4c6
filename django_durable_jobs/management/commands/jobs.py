"""``manage.py jobs``: look at jobs and schedules, and make an operator's moves."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, no_translations
from django.core.serializers.json import DjangoJSONEncoder
from django.db import DatabaseError, connections

from ... import conf
from ...exceptions import DurableJobsError
from ...worker.options import MigrationsMissing
from ...worker.schema import require_migrations
from ..jobs import SUBCOMMANDS, Subcommand
from ..jobs.base import plain


class Command(BaseCommand):
    help = "Look at durable jobs and schedules, and operate them."
    # What is wrong with the settings is told in one sentence.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_our_options(parser, json=False, database=None)
        chosen = parser.add_subparsers(dest="subcommand", required=True, metavar="subcommand")
        for one in SUBCOMMANDS:
            made = chosen.add_parser(one.name, help=one.help, description=one.help)
            # Not given here, what was given before the subcommand stays.
            _add_our_options(made, json=argparse.SUPPRESS, database=argparse.SUPPRESS)
            _add_djangos_options(made)
            one.arguments(made)

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        chosen = next(one for one in SUBCOMMANDS if one.name == options["subcommand"])
        alias = _alias(options["database"])
        try:
            answer = chosen.run(alias, options)
        except DurableJobsError as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            raise CommandError(_refusal(alias, error)) from error
        try:
            self._show(chosen, answer, as_json=options["json"])
        except BrokenPipeError:
            _leave_pipe()
        if not chosen.succeeded(answer):
            sys.exit(1)

    def _show(self, chosen: Subcommand, answer: Any, *, as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps(answer, cls=DjangoJSONEncoder, indent=2))
        else:
            for line in chosen.lines(answer):
                self.stdout.write(plain(line))
        self.stdout.flush()


def _add_our_options(parser: argparse.ArgumentParser, *, json: Any, database: Any) -> None:
    parser.add_argument("--json", action="store_true", default=json, help="Print JSON.")
    parser.add_argument("--database", default=database, help="The alias of the jobs' database.")


def _add_djangos_options(parser: argparse.ArgumentParser) -> None:
    """Take Django's own options behind the subcommand too; its own help names them."""

    def add(*flags: str, **how: Any) -> None:
        parser.add_argument(*flags, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)

    for flag in ("--settings", "--pythonpath"):
        add(flag)
    for flag in ("--traceback", "--no-color", "--force-color"):
        add(flag, action="store_true")
    add("-v", "--verbosity", type=int, choices=range(4))


def _refusal(alias: str, error: DatabaseError) -> str:
    try:
        require_migrations(alias)
    except MigrationsMissing as missing:
        return str(missing)
    except DatabaseError:
        pass
    # Its text may hold values of rows.
    return f"the database refused it: {type(error).__name__}."


def _leave_pipe() -> None:
    """Whoever read the output, such as ``head``, has had enough: what is left goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _alias(database: str | None) -> str:
    for problem in conf.problems():
        raise CommandError(problem)
    alias: str = conf.settings.DATABASE if database is None else database
    if alias not in connections.databases:
        known = ", ".join(sorted(connections.databases))
        raise CommandError(f'--database "{alias}" is not in DATABASES: use one of {known}.')
    return alias
