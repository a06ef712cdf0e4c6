"""``manage.py jobs``: look at jobs, and move them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from django.core.management.base import CommandError
from django.db.models import Count

from ... import states
from ...exceptions import DurableJobsError
from ...models import Job, JobAttempt
from ...pages import LIMIT_MAX, WALKED, read_page
from ...redaction import shown_parts
from ...transitions.operators import Done, recorded
from ...transitions.places import waiting_at_limits
from ...transitions.pruning import prune
from ...transitions.standing import standing
from ...words import counted
from ...worker.health import health
from .base import Options, Subcommand, operator, shown, table

LISTED = ("id", "status", "handler", "queue", "job_id", "scope", "attempt_count", "run_at")
LONG = ("created_at", "finished_at", "error_category", "error_summary")


def _list(alias: str, options: Options) -> dict[str, Any]:
    jobs = Job.objects.using(alias).only(*LISTED, *LONG)
    if options["scope"] is not None:
        jobs = jobs.in_scope(options["scope"])
    asked = {name: options[name] for name in ("handler", "queue", "status", "after", "limit")}
    try:
        page = read_page(jobs, **asked)
    except ValueError as error:
        raise CommandError(str(error)) from error
    return {
        "jobs": [_columns(job, LISTED + LONG) for job in page.jobs],
        "next_cursor": page.next_cursor,
    }


def _columns(row: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _list_lines(found: dict[str, Any]) -> Iterable[str]:
    cursor = found["next_cursor"]
    if found["jobs"]:
        yield from _job_lines(found["jobs"])
    else:
        yield "No jobs." if cursor is None else f"No jobs among the next {WALKED:,}."
    if cursor is not None:
        yield f"More: --after={cursor}"


def _job_lines(jobs: list[dict[str, Any]]) -> list[str]:
    rows = [["id", "status", "handler", "queue", "attempts", "run at", "ended", "job id", "error"]]
    for one in jobs:
        rows.append(
            [str(one[name]) for name in ("id", "status", "handler", "queue", "attempt_count")]
            + [shown(one["run_at"]), shown(one["finished_at"]), str(one["job_id"])]
            + [one["error_category"] or "-"]
        )
    return table(rows)


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--status", choices=states.JOB_STATUSES, help="Only jobs in this status.")
    parser.add_argument("--queue", help="Only jobs of this queue.")
    parser.add_argument("--handler", help="Only jobs of this handler, by its whole name.")
    parser.add_argument("--scope", help="Only jobs of this scope.")
    parser.add_argument(
        "--after", metavar="CURSOR", help="The next page, as the last one names it."
    )
    parser.add_argument("--limit", type=int, default=25, help=f"25; at most {LIMIT_MAX}.")


def _show(alias: str, options: Options) -> dict[str, Any]:
    job = _found(alias, options["job"], options["scope"])
    hidden = {"payload_sha256", "scope_hash"}
    names = [one.attname for one in Job._meta.concrete_fields if one.attname not in hidden]
    attempts = [
        _columns(one, [field.attname for field in one._meta.concrete_fields])
        for one in JobAttempt.objects.using(alias).filter(job_id=job.pk).order_by("number")
    ]
    columns = _columns(job, names) | shown_parts(job)
    limit = job.limit()
    return {
        **columns,
        "ownership": job.ownership,
        "standing": standing(job),
        "limit": None if limit is None else dataclasses.asdict(limit),
        "attempts": attempts,
    }


_OF_ATTEMPTS = (
    "worker",
    "token",
    "started_at",
    "finished_at",
    "progress",
    "error_category",
    "error_summary",
)


def _show_lines(found: dict[str, Any]) -> Iterable[str]:
    yield from found["standing"]
    yield ""
    # The limit is told by the sentences of a job that waits at it, the traceback by an attempt.
    apart = ("standing", "attempts", "limit", "error_traceback")
    rows = [[name, str(value)] for name, value in found.items() if name not in apart]
    yield from table([row for row in rows if row[1] not in ("", "None")])
    newest = max((one["number"] for one in found["attempts"] if one["error_traceback"]), default=0)
    for one in found["attempts"]:
        yield ""
        yield f"attempt {one['number']}: {one['status']}, {one['outcome'] or 'no outcome yet'}"
        rows = [[f"  {name}", str(one[name])] for name in _OF_ATTEMPTS if one[name] is not None]
        yield from table(rows)
        if one["number"] == newest:
            yield from one["error_traceback"].splitlines()


def _found(alias: str, key: str, scope: str | None) -> Job:
    """Find a job by its number; with a scope, or where it is no number, by the caller's id."""
    jobs = Job.objects.using(alias)
    by_number = scope is None and key.isdecimal()
    found = jobs.filter(pk=int(key)) if by_number else jobs.in_scope(scope or "").filter(job_id=key)
    job: Job | None = found.first()
    if job is not None:
        return job
    if by_number:
        raise CommandError(f'there is no job with number {key}; for a job id write --scope "".')
    hint = "; for another one write --scope" if scope is None else ""
    raise CommandError(f'there is no job "{key}" in scope "{scope or ""}"{hint}.')


def _takes_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="Its number, or its job id.")
    parser.add_argument("--scope", help="The scope of the job id; empty where JOB is no number.")


def _takes_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("jobs", metavar="JOB", nargs="+", help="Numbers, or job ids.")
    parser.add_argument("--scope", help="The scope of the job ids; empty where JOB is no number.")


def _on_each(
    action: str, move: Callable[[Job, Options], str]
) -> Callable[[str, Options], list[dict[str, Any]]]:
    """Make a move on each job for itself, and its record with it."""

    def run(alias: str, options: Options) -> list[dict[str, Any]]:
        return [_moved(alias, key, options, action, move) for key in options["jobs"]]

    return run


def _moved(
    alias: str, key: str, options: Options, action: str, move: Callable[[Job, Options], str]
) -> dict[str, Any]:
    try:
        job = _found(alias, key, options["scope"])

        def moved() -> Done:
            return Done(outcome=move(job, options), subject=str(job), job_key=job.pk)

        done = recorded(alias, moved, action=action, operator=operator())
    except (CommandError, DurableJobsError, Job.DoesNotExist) as error:
        return {"job": key, "outcome": "refused", "reason": str(error)}
    return {"job": key, "outcome": done.outcome, "reason": None}


def _moved_lines(found: list[dict[str, Any]]) -> Iterable[str]:
    for one in found:
        yield f"{one['job']}: {one['outcome']}" + (f": {one['reason']}" if one["reason"] else "")


def _none_refused(found: list[dict[str, Any]]) -> bool:
    return all(one["reason"] is None for one in found)


def _retry(job: Job, options: Options) -> str:
    job.retry(extra_attempts=options["extra_attempts"])
    return "retried"


def _retry_arguments(parser: argparse.ArgumentParser) -> None:
    _takes_jobs(parser)
    parser.add_argument(
        "--extra-attempts", type=int, default=0, metavar="N", help="Grant N executions more."
    )


def _recover(job: Job, options: Options) -> str:
    if options["token"] is None and job.lease_token:
        raise CommandError(
            f"cannot recover job {job.job_id}: it has a token; give --token (see jobs show)."
        )
    return job.recover(options["token"], requeue=options["requeue"])


def _recover_arguments(parser: argparse.ArgumentParser) -> None:
    _takes_jobs(parser)
    parser.add_argument("--token", help="The job's current one; none for a job without one.")
    parser.add_argument(
        "--requeue",
        action=argparse.BooleanOptionalAction,
        help="Whatever the handler's retry_on_interrupt says.",
    )


def _prune(alias: str, options: Options) -> dict[str, Any]:
    if not options["days"] > 0:
        raise CommandError("--days must be above 0.")
    statuses = frozenset(options["status"] or states.TERMINAL)
    return {"pruned": prune(alias, days=options["days"], statuses=statuses)}


def _prune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--days", type=float, required=True, help="Delete what ended more than so many days ago."
    )
    parser.add_argument(
        "--status", action="append", choices=sorted(states.TERMINAL), help="May be repeated."
    )


def _stats(alias: str, options: Options) -> dict[str, Any]:
    counts = Job.objects.using(alias).values_list("queue", "status").annotate(Count("id"))
    queues: dict[str, dict[str, int]] = {}
    for queue, status, count in counts.order_by("queue", "status"):
        queues.setdefault(queue, {})[status] = count
    found, waiting = health(alias), waiting_at_limits(alias)
    return {
        "queues": queues,
        "oldest_due_seconds": found.oldest_due_seconds,
        "waiting_at_limits": waiting.jobs,
        "oldest_at_limit_seconds": waiting.oldest_seconds,
        "live_workers": sum(one.is_live for one in found.workers),
    }


def _stats_lines(found: dict[str, Any]) -> Iterable[str]:
    rows = [["queue", *states.JOB_STATUSES]]
    for queue, counts in found["queues"].items():
        rows.append([str(queue), *(str(counts.get(one, 0)) for one in states.JOB_STATUSES)])
    yield from table(rows)
    due = found["oldest_due_seconds"]
    waited = "no job is due" if due is None else f"the oldest due job has waited {due:.0f} s"
    yield f"{counted(found['live_workers'], 'live worker')}; {waited}"
    if waiting := found["waiting_at_limits"]:
        oldest = found["oldest_at_limit_seconds"]
        yield f"at a limit: {counted(waiting, 'queued job')}; the oldest has waited {oldest:.0f} s"


def _moves(
    name: str,
    text: str,
    move: Callable[[Job, Options], str],
    arguments: Callable[[argparse.ArgumentParser], object] = _takes_jobs,
    *,
    action: str,
) -> Subcommand:
    return Subcommand(
        name=name,
        help=text,
        run=_on_each(action, move),
        lines=_moved_lines,
        arguments=arguments,
        succeeded=_none_refused,
    )


SUBCOMMANDS = (
    Subcommand(
        name="list",
        help="List jobs, the newest first.",
        run=_list,
        lines=_list_lines,
        arguments=_list_arguments,
    ),
    Subcommand(
        name="show",
        help="Show a job with its attempts.",
        run=_show,
        lines=_show_lines,
        arguments=_takes_job,
    ),
    Subcommand(
        name="stats",
        help="Count the jobs of each queue by status.",
        run=_stats,
        lines=_stats_lines,
    ),
    _moves(
        "cancel",
        "Request the cancel of jobs.",
        lambda job, options: job.request_cancel(),
        action="request_cancel",
    ),
    _moves("retry", "Queue ended jobs again, due now.", _retry, _retry_arguments, action="retry"),
    _moves(
        "release",
        "Let blocked jobs go on.",
        lambda job, options: job.release(),
        action="release",
    ),
    _moves(
        "recover",
        "End the attempt of a job whose worker is dead, which you vouch for.",
        _recover,
        _recover_arguments,
        action="recover",
    ),
    Subcommand(
        name="prune",
        help="Delete ended jobs with their attempts.",
        run=_prune,
        lines=lambda found: [f"deleted {counted(found['pruned'], 'job')}."],
        arguments=_prune_arguments,
    ),
)
