"""Renders a system as a table: every figure, its origin and its source."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from convmesh.system.figure import ORIGINS

if TYPE_CHECKING:
    from convmesh.system.system import System


def render(system: System) -> str:
    """The system's title, all figures, and how many have each origin."""
    rows = [("figure", "value", "origin", "source")]
    rows += [(key, str(figure), figure.origin, figure.provenance) for key, figure in system.figures()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows]
    return "\n".join([_title(system), "", *lines, "", _origins(system)])


def _title(system: System) -> str:
    levels = ", ".join(f"{level.name} ({level.medium})" for level in system.links)
    return (
        f"{system.name}: {system.summary}\n{int(system.node.devices)} × {system.device.kind} per node; links from the "
        f"inside out: {levels}; collectives: {system.collectives.library} ({', '.join(system.collectives.algorithms)})"
    )


def _origins(system: System) -> str:
    counts = Counter(figure.origin for _, figure in system.figures())
    return f"{counts.total()} figures: " + ", ".join(
        f"{counts[origin]} {origin}" for origin in ORIGINS if counts[origin]
    )
