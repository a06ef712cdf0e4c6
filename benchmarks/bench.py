"""One run of the benchmarks on one database: sizes, databases to work in, what was measured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from databases import Database
from processes import probe
from sides import DURABLE, PEER, Side

Record = dict[str, Any]


class Bench:
    """Give each measurement a fresh database, and keep its value."""

    def __init__(
        self, database: Database, records: list[Record], *, scale: float, repeat: int
    ) -> None:
        self.database = database
        self.records = records
        self.scale = scale
        self.repeat = repeat
        self._bases: dict[str, str] = {}

    def scaled(self, number: int, *, least: int = 1) -> int:
        return max(least, round(number * self.scale))

    def rounds(self) -> Iterator[Sequence[Side]]:
        """Give both sides, each time in the other order."""
        for number in range(self.repeat):
            yield (DURABLE, PEER) if number % 2 == 0 else (PEER, DURABLE)

    @contextmanager
    def fresh(self, base: str | None = None) -> Iterator[str]:
        """Give a database of its own for one measurement, a copy of ``base``."""
        place = self.database.create(base)
        try:
            yield place
        finally:
            self.database.drop(place)

    def base(self, side: Side, filled_by: str | None = None, **arguments: Any) -> str:
        """Give a migrated database to copy, filled by a probe; it is made once."""
        key = json.dumps([side.name, filled_by, arguments])
        if key not in self._bases:
            source = None if filled_by is None else self.base(side)
            place = self._bases[key] = self.database.create(source)
            if filled_by is None:
                probe(side, place, "migrate")
            else:
                self.say(f"filling {side.title}: {filled_by} {arguments}")
                probe(side, place, filled_by, **arguments)
        return self._bases[key]

    def drop_bases(self) -> None:
        for place in self._bases.values():
            self.database.drop(place)
        self._bases.clear()

    def record(
        self, figure: str, side: Side, what: str, value: float, unit: str, **detail: Any
    ) -> None:
        """Keep one value; those of the same figure, side and what are repeats of each other."""
        name = self.database.name
        key = {"figure": figure, "database": name, "side": side.name, "what": what, "unit": unit}
        for record in self.records:
            if all(record[part] == wanted for part, wanted in key.items()):
                break
        else:
            record = {**key, "values": [], "details": []}
            self.records.append(record)
        record["values"].append(value)
        record["details"].append(detail)
        self.say(f"{figure}: {side.title}: {what}: {value:,.4g} {unit}")

    def say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.database.name}: {text}", file=sys.stderr)
