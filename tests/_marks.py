"""Marks that several test modules share."""

from __future__ import annotations

import re

import pytest
from django.db import connection

no_database = pytest.mark.skipif(
    connection.vendor == "postgresql", reason="no database takes part: it runs with SQLite's suite"
)


def shown(value: object) -> str:
    """Name a parameter by its repr without addresses, so that it is the same in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
