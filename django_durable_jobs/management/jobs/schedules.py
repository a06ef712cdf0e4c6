"""``manage.py jobs``: look at the schedules, adopt, pause, resume, run and forget them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from ...schedules import operations
from ...schedules.overview import Overview, overview
from ...transitions.operators import Done, recorded
from .base import Options, Subcommand, operator, recorded_move, shown, table


def _schedules(alias: str, options: Options) -> list[dict[str, Any]]:
    return [_described(one) for one in overview(alias)]


def _described(one: Overview) -> dict[str, Any]:
    declared, cursor = one.declared, one.cursor
    return {
        "name": one.name,
        "state": _state(one),
        "cron": declared and declared.cron,
        "timezone": declared and declared.timezone,
        "handler": declared and declared.handler_name,
        "description": declared and declared.description,
        "last_minute": cursor and cursor.last_minute,
        "next_minute": cursor and cursor.next_minute,
        "lag_seconds": one.lag,
        "last_times": list(one.last_times),
        "next_times": list(one.next_times),
        "problem": cursor and cursor.problem,
    }


def _state(one: Overview) -> str:
    if one.cursor is None:
        return "not started"
    if one.declared is None:
        return "not declared"
    if one.runs_another_cron:
        return "another cron"
    if one.is_paused:
        return "paused"
    return "broken" if one.cursor.problem else "active"


def _overview_lines(found: list[dict[str, Any]]) -> Iterable[str]:
    if not found:
        yield "No schedules."
        return
    yield "Times are in UTC."
    for one in found:
        cron = f'"{one["cron"]}" in {one["timezone"]}' if one["cron"] else "not in this code"
        yield ""
        yield f"{one['name']}: {one['state']}, {cron}"
        rows = [["handler", one["handler"] or "-"]]
        if one["description"]:
            rows.append(["description", one["description"]])
        rows.append(["last", _listed(one["last_times"])])
        rows.append(["next", _listed(one["next_times"])])
        rows.append(["lag", f"{one['lag_seconds']:.0f} s"])
        if one["problem"]:
            rows.append(["problem", one["problem"]])
        yield from (f"  {line}" for line in table(rows))


def _listed(times: list[Any]) -> str:
    return ", ".join(map(shown, times)) or "-"


def _run_now(alias: str, options: Options) -> dict[str, Any]:
    schedule = options["schedule"]

    def moved() -> Done:
        job = operations.run_now(alias, schedule)
        subject = f"schedule {schedule}: {job}"
        return Done(outcome=operations.RUN_NOW, subject=subject, job_key=job.pk)

    done = recorded(alias, moved, action="run_schedule", operator=operator())
    return {"schedule": schedule, "outcome": done.outcome, "job": done.job_key}


def _outcome_lines(done: dict[str, Any]) -> Iterable[str]:
    job = f", job {done['job']}" if "job" in done else ""
    yield f"{done['schedule']}: {done['outcome']}{job}"


def _takes_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", metavar="NAME", help="The schedule's name.")


def _on_one(name: str, text: str, run: Callable[[str, Options], Any]) -> Subcommand:
    return Subcommand(name=name, help=text, run=run, lines=_outcome_lines, arguments=_takes_name)


SUBCOMMANDS = (
    Subcommand(
        name="schedules",
        help="Show each schedule with its last and next times and its lag.",
        run=_schedules,
        lines=_overview_lines,
    ),
    _on_one(
        "adopt-schedule",
        "Let this code's cron go on from the current minute.",
        recorded_move("schedule", "adopt_schedule", operations.adopt),
    ),
    _on_one(
        "pause-schedule",
        "Fire nothing more.",
        recorded_move("schedule", "pause_schedule", operations.pause),
    ),
    _on_one(
        "resume-schedule",
        "Go on from the current minute.",
        recorded_move("schedule", "resume_schedule", operations.resume),
    ),
    _on_one("run-schedule", "Make one job of a schedule now.", _run_now),
    _on_one(
        "forget-schedule",
        "Remove what is stored of a schedule that this code does not declare any more.",
        recorded_move("schedule", "forget_schedule", operations.forget),
    ),
)
