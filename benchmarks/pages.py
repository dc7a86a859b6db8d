"""Pages that several commands write: each replaces its own section, between marks, and leaves the others alone."""

from __future__ import annotations

import re
from pathlib import Path

ACCURACY = Path(__file__).parents[1] / "docs" / "accuracy.md"
TITLE = """# How near the oracle comes

Every section was written by the command that it names, with every point. Peaks of memory have a page of their own
([oracle_memory.md](../benchmarks/oracle_memory.md)), and so have steps on one GPU
([oracle_gpu.md](../benchmarks/oracle_gpu.md)).
"""


def put_section(name: str, text: str, page: Path = ACCURACY) -> None:
    """Write or replace the section called `name`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}\n"
    before = page.read_text() if page.exists() else TITLE
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}\n", re.DOTALL)
    match = marked.search(before)
    page.write_text(before[: match.start()] + section + before[match.end() :] if match else f"{before}\n{section}")
