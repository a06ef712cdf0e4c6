"""The figures, one function each. Sizes are those of a full run; ``--scale`` changes them."""

from __future__ import annotations

import json
from pathlib import Path

from bench import Bench
from processes import drain as run_workers
from processes import probe
from sides import DURABLE, PEER, PEER_BEST, PLAIN, THREADS_32, Side, Workers

ONE_BY_ONE = 2_000
BULK = 10_000
# Enough for at least five seconds of either side; beside other rows the peer would take
# minutes for as many.
DRAINED = {DURABLE.name: 40_000, PEER.name: 3_000}
LEAST_DRAINED = {DURABLE.name: 4_000, PEER.name: 200}
PEER_BESIDE_OTHERS = 60
CROWD = {"finished": 1_000_000, "future": 1_000_000, "running": 50_000}
OTHER_QUEUE = 1_000_000
NEWER_CODE = 200_000
CLAIMS, CLAIM_LIMIT, PEER_CLAIMS = 200, 16, 20
FULL_KEYS, AT_LIMIT = 10_000, 100_000
SCHEDULES, PASSES = 1_000, 200
CHECKS, CHECK_ROUNDS = 20_000, 15


def enqueue(bench: Bench) -> None:
    """Make jobs one by one."""
    _rates(bench, "enqueue", {side.name: ONE_BY_ONE for side in (DURABLE, PEER)})


def bulk(bench: Bench) -> None:
    """Make many jobs at once."""
    _rates(bench, "bulk", {side.name: BULK for side in (DURABLE, PEER)})


def _rates(bench: Bench, figure: str, counts: dict[str, int]) -> None:
    for sides in bench.rounds():
        for side in sides:
            count = bench.scaled(counts[side.name], least=100)
            with bench.fresh(bench.base(side)) as place:
                found = probe(side, place, figure, count=count)
            for what, rate in found.items():
                bench.record(figure, side, what, rate, "jobs/s", jobs=count)


def drain(bench: Bench) -> None:
    """Run jobs that are already there, in a table that holds nothing else."""
    for sides in bench.rounds():
        for side in sides:
            for processes in (2,) if bench.database.name == "postgres" else (1, 2):
                for workers in (PLAIN, THREADS_32) if side is DURABLE else (PEER_BEST,):
                    _drain(bench, "drain", workers, processes, _drained(bench, side))


def crowd(bench: Bench) -> None:
    """Drain beside history and future rows, and an empty table right before it."""
    sizes = {name: bench.scaled(number, least=1_000) for name, number in CROWD.items()}
    processes = 2 if bench.database.name == "postgres" else 1
    for sides in bench.rounds():
        for side in sides:
            workers = PLAIN if side is DURABLE else PEER_BEST
            full = bench.base(side, "crowd", **sizes)
            _drain(bench, "crowd", workers, processes, _drained(bench, side), name="empty table")
            count = _drained(bench, side)
            if side is PEER:
                count = min(count, PEER_BESIDE_OTHERS)
            _drain(bench, "crowd", workers, processes, count, name="beside others", base=full)


def _drained(bench: Bench, side: Side) -> int:
    return bench.scaled(DRAINED[side.name], least=LEAST_DRAINED[side.name])


def _drain(
    bench: Bench,
    figure: str,
    workers: Workers,
    processes: int,
    count: int,
    *,
    name: str = "",
    base: str | None = None,
) -> None:
    side = workers.side
    with bench.fresh(base or bench.base(side)) as place:
        marks = probe(side, place, "fill", count=count)
        bench.database.settle(place)
        with bench.database.connect(place) as first:
            run_workers(workers, place, processes, lambda: first(_unfinished(marks["after"])))
        found = probe(side, place, "result", count=count, **marks)
    what = f"{processes} x {workers.what}"
    if name:
        what = name
    rate = found.pop("rate")
    bench.record(figure, side, what, rate, "jobs/s", processes=processes, **found)


def _unfinished(after: int) -> str:
    return (
        "SELECT count(*) FROM django_durable_jobs_job"
        f" WHERE id > {int(after)} AND finished_at IS NULL"
    )


def claim(bench: Bench) -> None:
    """Time one claim of a queue, alone and behind rows that this worker must not take."""
    others = bench.scaled(OTHER_QUEUE, least=1_000)
    newer = bench.scaled(NEWER_CODE, least=1_000)
    behind = {"count": newer, "queue": "served", "version": 2, "priority": 100}
    for sides in bench.rounds():
        for side in sides:
            _claims(bench, side, "empty table", bench.base(side))
            other = bench.base(side, "queued", count=others, queue="other")
            _claims(bench, side, "beside another queue", other)
        newest = bench.base(DURABLE, "queued", **behind)
        _claims(bench, DURABLE, "behind jobs for newer code", newest)


def limits(bench: Bench) -> None:
    """Time one claim under limits, and one without, alone and beside keys that are full."""
    keys = bench.scaled(FULL_KEYS, least=100)
    crowded = {"keys": keys, "waiting": bench.scaled(AT_LIMIT, least=1_000)}
    for _ in bench.rounds():
        for handler in ("noop", "limited"):
            for what, base in (
                ("empty table", bench.base(DURABLE)),
                ("beside full keys", bench.base(DURABLE, "at_limit", **crowded)),
            ):
                sizes = {"count": bench.scaled(CLAIMS, least=20), "limit": CLAIM_LIMIT}
                with bench.fresh(base) as place:
                    bench.database.settle(place)
                    found = probe(
                        DURABLE, place, "claims", queue="served", handler=handler, **sizes
                    )
                value = found["claim"]["median"]
                bench.record("limits", DURABLE, f"{handler}, {what}", value, "ms", **sizes, **found)


def _claims(bench: Bench, side: Side, what: str, base: str) -> None:
    sizes = {"count": bench.scaled(PEER_CLAIMS, least=5)}
    if side is DURABLE:
        sizes = {"count": bench.scaled(CLAIMS, least=20), "limit": CLAIM_LIMIT}
    with bench.fresh(base) as place:
        bench.database.settle(place)
        found = probe(side, place, "claims", queue="served", **sizes)
    bench.record("claim", side, what, found["claim"]["median"], "ms", **sizes, **found)


def schedules(bench: Bench) -> None:
    """Time the scheduling passes of a worker; the peer has no schedules."""
    sizes = {"count": bench.scaled(SCHEDULES, least=20), "passes": bench.scaled(PASSES, least=20)}
    for _ in bench.rounds():
        with bench.fresh(bench.base(DURABLE)) as place:
            found = probe(DURABLE, place, "schedules", **sizes)
        values = {
            "first start": found["first"],
            "later start": found["again"],
            "pass, nothing due": found["idle"]["median"],
            "pass, all due": found["due"],
        }
        for what, value in values.items():
            bench.record("schedules", DURABLE, what, value, "ms", **sizes, **found)


def checks(bench: Bench) -> None:
    """Time the checks of a small payload, which touch no database."""
    sizes = {"count": bench.scaled(CHECKS, least=500), "rounds": CHECK_ROUNDS}
    for _ in bench.rounds():
        found = probe(DURABLE, bench.base(DURABLE), "checks", **sizes)
        for what, value in found.items():
            bench.record("checks", DURABLE, what, value["median"], "µs", **sizes, **value)


def plans(bench: Bench, path: Path) -> None:
    """Write the plans of the hot statements beside other rows."""
    sizes = {name: bench.scaled(number, least=1_000) for name, number in CROWD.items()}
    full = bench.base(DURABLE, "crowd", **sizes)
    with bench.fresh(full) as place:
        found = probe(DURABLE, place, "plans", count=1_000)
    lines = [f"Plans on {bench.database.name} beside {json.dumps(sizes)}\n"]
    for step, texts in found.items():
        lines += [f"== {step}\n", *(f"{text}\n" for text in texts)]
    path.write_text("\n".join(lines))
    bench.say(f"plans are in {path}")


FIGURES = {
    "enqueue": enqueue,
    "bulk": bulk,
    "drain": drain,
    "crowd": crowd,
    "claim": claim,
    "limits": limits,
    "schedules": schedules,
    "checks": checks,
}
