"""The support matrix of the README, from the marks and grids of the operator tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from convmesh import Mesh

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- support matrix: made by `make matrix` -->", "<!-- end of support matrix -->"
COLUMNS = {"data": "N", "depth": "D", "height": "H", "width": "W", "channel": "C", "filter": "F"}


def matrix(items: Iterable[pytest.Item]) -> str:
    """A Markdown table: a row for each `operator` mark, ticks for the cuts among its meshes."""
    rows: dict[tuple[str, str], list[Mesh]] = {}
    for item in items:
        mark = item.get_closest_marker("operator")
        if mark and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            mesh = item.callspec.params["mesh"]
            assert isinstance(mesh, Mesh)
            rows.setdefault(mark.args, []).append(mesh)
    head = f"| operator | options | {' | '.join(COLUMNS.values())} | at once | ranks |"
    lines = [head, "| --- | --- |" + " :-: |" * (len(COLUMNS) + 2)]
    return "\n".join(lines + [_row(name, options, meshes) for (name, options), meshes in sorted(rows.items())])


def _row(name: str, options: str, meshes: list[Mesh]) -> str:
    cut = ["✓" if any(axis in mesh.axes for mesh in meshes) else "–" for axis in COLUMNS]
    most = max(len(mesh.axes) for mesh in meshes)
    ranks = ", ".join(str(n) for n in sorted({mesh.size for mesh in meshes}))
    return f"| {name} | {options} | {' | '.join(cut)} | {most} | {ranks} |"


def in_readme() -> str:
    """The matrix that the README shows."""
    text = README.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def write_readme(table: str) -> None:
    text = README.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    README.write_text(f"{head}\n{table}\n{tail}")
