"""The protocol model of ``job.pml``, searched through by spin, and tied to ``states.MOVES``."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from django_durable_jobs import states
from tests._marks import no_database

pytestmark = [no_database, pytest.mark.timeout(700)]

MODEL = Path(__file__).with_name("job.pml")
SPIN = shutil.which("spin")
COMPILER = shutil.which("gcc") or shutil.which("cc")

needs_spin = pytest.mark.skipif(
    SPIN is None, reason="spin is not installed (the Debian package spin)"
)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

# Why a move of the code is not in the model.
LEFT_OUT = {
    "exhaust": "it ends imported or damaged rows; `audit` shows that no move makes such a row",
}

NO_STALE_WRITE = "held[me]==valid"
NOT_TAKEN_OVER = "token==held[me]"
ONE_OWNER = "valid==((lease_live)?(token):(0))"

# Each planted fault: how it is searched for, and what must be reported.
FAULTS = {
    "FINISH_WITHOUT_TOKEN": ("safety", NO_STALE_WRITE),
    "RECOVER_WITHOUT_EXPIRY": ("safety", ONE_OWNER),
    "RENEW_WITHOUT_LEASE": ("safety", "renewing[me]==valid"),
    "COMPLETE_WITHOUT_FENCE": ("safety", NOT_TAKEN_OVER),
    "FENCE_WITHOUT_LOCK": ("safety", NOT_TAKEN_OVER),
    "CLOCK_BEFORE_LOCK": ("safety", NO_STALE_WRITE),
    "BUSY_IS_LOST": ("safety", "held[me]!=valid"),
    "FINISH_IGNORES_CANCEL": ("safety", "!(cancel_requested)"),
    "RECOVER_IN_TWO": ("safety", "(attempt=="),
    "NO_RECOVERY": ("ends", "invalidendstate"),
    "LOSS_IS_FREE": ("endless", "non-progresscycle"),
}

# What the verifier is compiled with, what it is run with, and what the model is told.
SEARCHES = {
    "safety": (["-DSAFETY"], [], []),
    "ends": (["-DSAFETY"], [], ["-DBOUNDED"]),
    "endless": (["-DNP"], ["-l"], ["-DBOUNDED"]),
}


@dataclass(frozen=True)
class Found:
    output: str

    @property
    def errors(self) -> int:
        return int(re.search(r"errors: (\d+)", self.output)[1])

    @property
    def states(self) -> int:
        return int(float(re.search(r"([\d.e+]+) states, stored", self.output)[1]))

    @property
    def unreached(self) -> list[str]:
        found = re.findall(r'^\t\S+:\d+, state \d+, "(.*)"$', self.output, re.MULTILINE)
        return [statement for statement in found if statement != "-end-"]

    def assert_complete(self) -> None:
        """Nothing was found, and nothing was left unsearched."""
        assert self.errors == 0, self.output
        for sign in ("warning", "too small", "not completed", "out of memory"):
            assert sign not in self.output.lower(), self.output


def table(moves: tuple[states.Move, ...] = states.MOVES) -> str:
    """Give the legal moves as the macros that the model asserts."""
    lines = []
    for move in moves:
        for side, statuses in (("FROM", move.sources), ("INTO", move.targets)):
            any_of = " || ".join(f"status == {status.upper()}" for status in statuses)
            lines.append(f"#define {side}_{move.name} ({any_of})\n")
    return "".join(lines)


def search(
    kind: str, directory: Path, *told: str, moves: str | None = None, optimised: bool = False
) -> Found:
    """Generate the verifier, compile it, and search the state space to its end or an error."""
    compiled_with, run_with, mode = SEARCHES[kind]
    shutil.copy(MODEL, directory)
    (directory / "moves.h").write_text(table() if moves is None else moves)
    generated = run(directory, SPIN, "-DTABLE", *mode, *told, "-a", MODEL.name)
    assert "warning" not in generated.lower(), generated
    level = "-O2" if optimised else "-O0"
    run(directory, COMPILER, level, "-w", *compiled_with, "-o", "pan", "pan.c")
    return Found(run(directory, "./pan", "-m20000", "-w22", *run_with))


def run(directory: Path, *command: Any) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stored(found: Found, record_property: Any) -> int:
    record_property("states", found.states)
    return found.states


@needs_spin
@needs_compiler
def test_no_interleaving_breaks_safety(tmp_path: Path, record_property: Any) -> None:
    found = search("safety", tmp_path, optimised=True)
    found.assert_complete()
    assert stored(found, record_property) > 100_000
    # Every statement was executed, so that no assertion held for want of a visit.
    assert found.unreached == []


@needs_spin
@needs_compiler
def test_where_nothing_more_can_happen_the_job_has_ended_or_is_blocked(
    tmp_path: Path, record_property: Any
) -> None:
    found = search("ends", tmp_path, optimised=True)
    found.assert_complete()
    assert stored(found, record_property) > 100_000


@needs_spin
@needs_compiler
def test_no_run_goes_on_for_ever(tmp_path: Path, record_property: Any) -> None:
    found = search("endless", tmp_path, optimised=True)
    found.assert_complete()
    assert stored(found, record_property) > 100_000


@needs_spin
@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    kind, reported = FAULTS[fault]
    found = search(kind, tmp_path, f"-DFAULT_{fault}")
    assert found.errors > 0, found.output
    [report] = re.findall(r"^pan:1: (.*)$", found.output, re.MULTILINE)
    assert reported in report.replace(" ", ""), found.output


@needs_spin
@needs_compiler
def test_a_move_outside_the_table_is_found(tmp_path: Path) -> None:
    """The model is held to ``states.MOVES`` while it runs, not by its names alone."""
    move = states.TRANSITIONS["recover"]
    narrowed = table().replace(
        f"#define INTO_{move.name} (status == QUEUED || ", f"#define INTO_{move.name} ("
    )
    assert narrowed != table()
    found = search("safety", tmp_path, moves=narrowed)
    assert found.errors > 0, found.output


def test_every_planted_fault_is_tried() -> None:
    assert set(re.findall(r"\bFAULT_(\w+)", MODEL.read_text())) == set(FAULTS)


def test_the_model_has_the_moves_and_statuses_of_the_code() -> None:
    text = MODEL.read_text()
    assert set(LEFT_OUT) <= set(states.TRANSITIONS)
    assert set(re.findall(r"^inline move_(\w+)\(", text, re.MULTILINE)) == (
        set(states.TRANSITIONS) - set(LEFT_OUT)
    )
    [statuses] = re.findall(r"^mtype = \{ (SCHEDULED.*?) \}", text, re.MULTILINE)
    assert statuses.lower().split(", ") == list(states.JOB_STATUSES)


def test_the_model_makes_every_end_of_a_move_that_the_table_allows() -> None:
    """Together with "every statement was executed" above: each is reached."""
    made: dict[str, set[str]] = defaultdict(set)
    for name, status in re.findall(r"\bMADE\((\w+), ([A-Z]+)\)", MODEL.read_text()):
        made[name].add(status.lower())
    assert made == {
        move.name: set(move.targets) for move in states.MOVES if move.name not in LEFT_OUT
    }
