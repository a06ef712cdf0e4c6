"""What the tests of the testing kit share."""

from __future__ import annotations

import pytest

# Run a test in a TestCase's transaction, and once more without one.
in_either_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param("TestCase", marks=pytest.mark.django_db),
        pytest.param("TransactionTestCase", marks=pytest.mark.django_db(transaction=True)),
    ],
)
