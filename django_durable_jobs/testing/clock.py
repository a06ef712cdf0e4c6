"""``FakeClock``: the clock seam made public (CONTRACT 7.2)."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import TracebackType

from .. import clock
from ..instants import from_microseconds, seconds_to_microseconds, to_microseconds


class FakeClock:
    """Replace the clock of this process: ``with FakeClock(start) as clock: clock.advance(60)``.

    Every due, lease and schedule decision reads it, and it is written into every instant that
    this process stores meanwhile. Handler timeouts stay on the monotonic clock. It is read as
    a statement is sent, so test races over locks with the real clock.
    """

    def __init__(self, start: datetime) -> None:
        self._instant = to_microseconds(start)

    @property
    def now(self) -> datetime:
        """The instant that the clock shows, aware, in UTC."""
        return from_microseconds(self._instant)

    def advance(self, delta: timedelta | float) -> datetime:
        """Move the clock by a timedelta or by seconds (below 0: a step back); give the new now.

        ``TypeError`` for anything else.
        """
        if isinstance(delta, bool) or not isinstance(delta, timedelta | int | float):
            raise TypeError(f"advance() takes a timedelta or seconds, not {type(delta).__name__}.")
        step = (
            delta // timedelta(microseconds=1)
            if isinstance(delta, timedelta)
            else seconds_to_microseconds(delta)
        )
        moved = from_microseconds(self._instant + step)
        self._instant += step
        return moved

    def __enter__(self) -> FakeClock:
        if clock.replaced() is not None:
            raise RuntimeError("another FakeClock is active in this process: leave it first")
        clock.replace(lambda: self._instant)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        clock.replace(None)
