"""Marks that several test modules share."""

from __future__ import annotations

import pytest
from django.db import connection

no_database = pytest.mark.skipif(
    connection.vendor == "postgresql", reason="no database takes part: it runs with SQLite's suite"
)
