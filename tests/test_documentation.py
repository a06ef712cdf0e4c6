"""Each page of the documentation is led to, from the README and from the built index."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\(docs/(\w+)\.md\)", (ROOT / "README.md").read_text()))
    # The quickstart is the README's own.
    assert linked == PAGES - {"quickstart"}


def test_the_index_leads_to_every_page() -> None:
    listed = re.findall(r"(?m)^(\w+)$", (ROOT / "docs" / "index.md").read_text())
    assert sorted(listed) == sorted(PAGES)
