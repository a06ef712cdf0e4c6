"""Write the generated parts of lifecycle.md from ``states.MOVES``: ``python docs/_lifecycle.py``.

A test compares the page with what this would write.
"""

from __future__ import annotations

import re
from pathlib import Path

from django_durable_jobs.states import JOB_STATUSES, MOVES

PAGE = Path(__file__).with_name("lifecycle.md")


def diagram() -> str:
    """Give the moves between different statuses as a Mermaid state diagram."""
    lines = ["```text", "stateDiagram-v2", "    [*] --> scheduled: submit, due later"]
    lines.append("    [*] --> queued: submit, due now")
    for source in JOB_STATUSES:
        for target in JOB_STATUSES:
            names = [
                move.name
                for move in MOVES
                if source in move.sources and target in move.targets and source != target
            ]
            if names:
                lines.append(f"    {source} --> {target}: {', '.join(names)}")
    return "\n".join([*lines, "```"])


def table() -> str:
    """Give every move as a row of a Markdown table."""
    titles = ("move", "from", "to", "by", "needs the token's lease")
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    lines += [
        f"| `{move.name}` | {', '.join(move.sources)} | {', '.join(move.targets)} | {move.by} |"
        f" {'yes' if move.fenced else 'no'} |"
        for move in MOVES
    ]
    return "\n".join(lines)


def filled(text: str) -> str:
    """Give the page's text with its generated parts made anew."""
    for name, part in (("diagram", diagram()), ("table", table())):
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        text = re.sub(pattern, rf"\1{part}\2", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
