"""The protocol of concurrency limits in ``limits.pml``, searched through by spin."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests._marks import no_database

from .test_model import COMPILER, SPIN, Found, needs_compiler, needs_spin, run

pytestmark = [no_database, needs_spin, needs_compiler]

MODEL = Path(__file__).with_name("limits.pml")
TOO_MANY = "running<="
STUCK = "invalidendstate"

# Each planted fault: what the model is told besides, what is asked, and what must be reported.
FAULTS = {
    "NO_LOCK": ((), ("-E",), TOO_MANY),
    "COUNT_WITH_LOCK": ((), ("-E",), TOO_MANY),
    "NOT_LATER": ((), (), STUCK),
    "LET_IN_WITHOUT_LOCK": ((), (), STUCK),
    "NO_PASS": (("-DDIES",), (), STUCK),
}


def search(directory: Path, *told: str, asked: tuple[str, ...] = ()) -> Found:
    """Look for a state with too many running jobs and, unless ``-E``, for an end without all."""
    shutil.copy(MODEL, directory)
    run(directory, SPIN, *told, "-a", MODEL.name)
    run(directory, COMPILER, "-O1", "-w", "-DSAFETY", "-o", "pan", "pan.c")
    return Found(run(directory, "./pan", "-m100000", "-w22", *asked))


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("told", [(), ("-DDIES",)], ids=["nobody dies", "who ends may die"])
def test_never_more_than_its_number_and_nobody_waits_for_ever(
    told: tuple[str, ...], places: int, tmp_path: Path
) -> None:
    found = search(tmp_path, f"-DPLACES={places}", *told)
    found.assert_complete()
    assert found.states > 500
    assert found.unreached == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    told, asked, reported = FAULTS[fault]
    found = search(tmp_path, f"-DFAULT_{fault}", *told, asked=asked)
    assert found.errors > 0, found.output
    [report] = re.findall(r"^pan:1: (.*)$", found.output, re.MULTILINE)
    assert reported in report.replace(" ", ""), found.output


def test_every_planted_fault_is_tried() -> None:
    assert set(re.findall(r"\bFAULT_(\w+)", MODEL.read_text())) == set(FAULTS)
