"""``manage.py jobs``: who works, and whether all is well."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from ...worker.health import Seen, health, seen_workers
from .base import Options, Subcommand, shown, table


def _workers(alias: str, options: Options) -> list[dict[str, Any]]:
    return [_described(one) for one in seen_workers(alias)]


def _described(one: Seen) -> dict[str, Any]:
    return {
        "name": one.name,
        "host": one.host,
        "pid": one.pid,
        "live": one.is_live,
        "queues": one.queues,
        "excluded_queues": one.excluded_queues,
        "started_at": one.started_at,
        "seen_seconds": round(one.seen_seconds, 1),
        "health": one.health,
    }


def _worker_lines(found: list[dict[str, Any]]) -> Iterable[str]:
    if not found:
        yield "No workers."
        return
    rows = [["worker", "host", "pid", "live", "queues", "slots", "held", "started", "seen"]]
    for one in found:
        queues = "any" if one["queues"] is None else ",".join(map(str, one["queues"]))
        rows.append(
            [str(one["name"]), str(one["host"]), str(one["pid"]), "yes" if one["live"] else "no"]
            + [queues, *(str(one["health"].get(key, "-")) for key in ("slots", "held"))]
            + [shown(one["started_at"]), f"{one['seen_seconds']:.0f} s ago"]
        )
    yield from table(rows)


def _health(alias: str, options: Options) -> dict[str, Any]:
    found = health(alias, name=options["name"], max_due_seconds=options["max_due"])
    return {
        "healthy": not found.problems,
        "problems": found.problems,
        "oldest_due_seconds": found.oldest_due_seconds,
        "stuck_running": found.stuck,
        "unknown_running": found.unknown,
        "workers": [_described(one) for one in found.workers],
    }


def _health_lines(found: dict[str, Any]) -> Iterable[str]:
    yield "All is well." if found["healthy"] else "There are problems:"
    yield from (f"  {problem}" for problem in found["problems"])
    due = found["oldest_due_seconds"]
    live = sum(one["live"] for one in found["workers"])
    yield from table(
        [
            ["live workers", str(live)],
            ["oldest due job", "-" if due is None else f"has waited {due:.0f} s"],
            ["lost leases", str(found["stuck_running"])],
            ["running, unknown", str(found["unknown_running"])],
        ]
    )


def _health_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="Judge only the workers that were started with this name.")
    parser.add_argument(
        "--max-due", type=float, metavar="SECONDS", help="A due job may wait so long at most."
    )


SUBCOMMANDS = (
    Subcommand(
        name="workers",
        help="Show the workers, and when each was last seen.",
        run=_workers,
        lines=_worker_lines,
    ),
    Subcommand(
        name="health",
        help="Tell whether workers live and their loops succeed; exit code 1 if not.",
        run=_health,
        lines=_health_lines,
        arguments=_health_arguments,
        succeeded=lambda found: bool(found["healthy"]),
    ),
)
