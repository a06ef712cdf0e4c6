"""The page on the life of a job shows the moves as ``states`` has them."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "docs" / "_lifecycle.py"


def test_the_generated_parts_are_up_to_date():
    script = runpy.run_path(str(SCRIPT))
    text = script["PAGE"].read_text()
    assert script["filled"](text) == text, "run python docs/_lifecycle.py"
    assert "running --> succeeded: finish, complete" in text
