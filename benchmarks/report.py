"""From the values to medians, ratios and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench import Record
from sides import DURABLE, PEER, PEER_BEST, PLAIN, THREADS_32

TITLES = {side.name: side.title for side in (DURABLE, PEER)}


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One value over another; both are a side and what was measured of it."""

    figure: str
    text: str
    top: tuple[str, str]
    bottom: tuple[str, str]


def _of(figure: str, text: str, top: str, bottom: str, side: str = DURABLE.name) -> Ratio:
    return Ratio(figure=figure, text=text, top=(side, top), bottom=(side, bottom))


def _over_peer(figure: str, text: str, ours: str, theirs: str) -> Ratio:
    return Ratio(figure=figure, text=text, top=(DURABLE.name, ours), bottom=(PEER.name, theirs))


def _drains() -> Iterator[Ratio]:
    for number in (1, 2):
        for workers in (PLAIN, THREADS_32):
            ours = f"{number} x {workers.what}"
            yield _over_peer("drain", f"{ours} / peer", ours, f"{number} x {PEER_BEST.what}")


RATIOS = (
    _of("enqueue", "submit / bare INSERT", "submit", "bare"),
    _of("enqueue", "stage / bare INSERT in atomic()", "stage", "bare_atomic"),
    _over_peer("enqueue", "submit / peer's enqueue", "submit", "enqueue"),
    _over_peer("enqueue", "stage / peer's enqueue in atomic()", "stage", "enqueue_atomic"),
    _of("bulk", "submit_many / bare bulk INSERT", "submit_many", "bare"),
    _over_peer(
        "bulk", "submit_many / peer in one transaction", "submit_many", "enqueue_in_one_transaction"
    ),
    *_drains(),
    _of("crowd", "beside others / empty table", "beside others", "empty table"),
    _of("crowd", "the peer's same", "beside others", "empty table", PEER.name),
    _of("claim", "beside another queue / empty table", "beside another queue", "empty table"),
    _of("claim", "behind newer code / empty table", "behind jobs for newer code", "empty table"),
    _of("claim", "the peer's same", "beside another queue", "empty table", PEER.name),
    _of(
        "limits",
        "beside full keys / empty table",
        "limited, beside full keys",
        "limited, empty table",
    ),
    _of("limits", "the same without a limit", "noop, beside full keys", "noop, empty table"),
    _of("limits", "with a limit / without", "limited, empty table", "noop, empty table"),
)


def ratios(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Divide repeat by repeat, so that each pair was measured close together."""
    values = {
        (one["database"], one["figure"], one["side"], one["what"]): one["values"] for one in records
    }
    found = []
    for database in dict.fromkeys(one["database"] for one in records):
        for ratio in RATIOS:
            top = values.get((database, ratio.figure, *ratio.top))
            bottom = values.get((database, ratio.figure, *ratio.bottom))
            if top and bottom:
                pairs = [one / other for one, other in zip(top, bottom, strict=False)]
                found.append(
                    {
                        "database": database,
                        "figure": ratio.figure,
                        "text": ratio.text,
                        "values": pairs,
                    }
                )
    return found


def markdown(results: dict[str, Any]) -> str:
    parts = [
        _facts("Machine", results["machine"]),
        *(_facts(f"Database: {name}", facts) for name, facts in results["databases"].items()),
        _facts("Workers", results["workers"]),
        _facts("Run", results["run"]),
        _table("Measured", results["records"], ("database", "figure", "side", "what", "unit")),
        _table("Ratios", ratios(results["records"]), ("database", "figure", "text")),
    ]
    return "\n".join(parts)


def _facts(title: str, facts: dict[str, Any]) -> str:
    lines = [f"| {title} | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    return "\n".join(lines) + "\n"


def _table(title: str, records: Sequence[Record], names: Sequence[str]) -> str:
    heads = [*names, "median", "min", "max", "repeats"]
    lines = [f"## {title}\n", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for record in records:
        values = record["values"]
        cells = [TITLES.get(record[name], record[name]) for name in names]
        cells += [_number(statistics.median(values)), _number(min(values)), _number(max(values))]
        lines.append(f"| {' | '.join(cells)} | {len(values)} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
