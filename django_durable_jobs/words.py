"""Words of what is told to people."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Give a number with what it counts: ``1 job``, ``2 jobs``; ``process`` has its own plural."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"
