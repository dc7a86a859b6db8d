"""Pages that several commands write: each replaces its own section, between marks, and leaves the others alone."""

from __future__ import annotations

import re
from pathlib import Path

ACCURACY = Path(__file__).parents[1] / "benchmarks" / "oracle_accuracy.md"
TITLE = """# Oracle accuracy

Each section was written by the command it names and lists every point. Memory peaks
([oracle_memory.md](oracle_memory.md)) and steps on one GPU ([oracle_gpu.md](oracle_gpu.md)) have their own pages; the
summary for readers is [docs/accuracy.md](../docs/accuracy.md).
"""


def put_section(name: str, text: str, page: Path = ACCURACY) -> None:
    """Write or replace the section called `name`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}\n"
    before = page.read_text() if page.exists() else TITLE
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}\n", re.DOTALL)
    match = marked.search(before)
    page.write_text(before[: match.start()] + section + before[match.end() :] if match else f"{before}\n{section}")
