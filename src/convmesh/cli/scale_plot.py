"""Scaling curves as a text plot and as an SVG: speed-up over ranks, both axes in powers of two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from convmesh.bench.palette import COLOURS
from convmesh.oracle.scaling_limits import Curve
from convmesh.planner.scaling import Scaling

MARKS = {
    "data": "d", "spatial": "s", "filter": "f", "channel": "c", "pipeline": "p", "hybrid": "h",
    "data+spatial": "x", "data+filter": "y", "data+channel": "z", "data+pipeline": "w",
}  # fmt: skip
"""Letter of each strategy; a capital marks its limit."""


def speed_ups(scaling: Scaling, curve: Curve) -> list[tuple[int, float]]:
    """Number of ranks and speed-up over one device, for every point that has a plan."""
    alone = scaling.samples_per_second_alone
    return [(p.ranks, p.samples_per_second / alone) for p in curve.points if p.ranked is not None]


def text_plot(scaling: Scaling) -> list[str]:
    """One row per doubling of speed; `.` marks the ideal, a capital letter a strategy's limit."""
    drawn = {curve.strategy: speed_ups(scaling, curve) for curve in scaling.curves}
    points = [point for line in drawn.values() for point in line]
    if not points:
        return ["nothing to draw: no strategy has a plan"]
    right = max(round(math.log2(ranks)) for ranks, _ in points)
    top = max(1, *(_level(speed) for _, speed in points))
    cells = {(n, n): "." for n in range(min(top, right) + 1)}
    for curve in scaling.curves:
        mark = MARKS[curve.strategy]
        for ranks, speed in drawn[curve.strategy]:
            at = round(math.log2(ranks)), _level(speed)
            ends = curve.limit is not None and curve.limit.ranks == ranks
            cells[at] = cells.get(at, "").removeprefix(".") + (mark.upper() if ends else mark)
    wide = max(4, *(len(cell) + 1 for cell in cells.values()))
    return ["speed-up", *_rows(cells, right, top, wide), _legend(scaling)]


def _level(speed: float) -> int:
    return max(0, round(math.log2(max(speed, 1.0))))


def _rows(cells: Mapping[tuple[int, int], str], right: int, top: int, wide: int) -> list[str]:
    columns = range(right + 1)
    rows = [
        f"{2**level:>7} |" + "".join(f"{cells.get((column, level), ''):^{wide}}" for column in columns)
        for level in range(top, -1, -1)
    ]
    axis = " " * 8 + "+" + "-" * (wide * (right + 1))
    return [*rows, axis, "  ranks  " + "".join(f"{_short(2**column):^{wide}}" for column in columns)]


def _legend(scaling: Scaling) -> str:
    marks = "  ".join(f"{MARKS[curve.strategy]} {curve.strategy}" for curve in scaling.curves)
    return f"{marks}  . ideal  (capital: limit)"


def _short(number: int) -> str:
    return str(number) if number < 1024 else f"{number // 1024}k"


def svg(scalings: Mapping[str, Scaling]) -> str:
    """Panels side by side, one per kind of scaling."""
    width, height = 460, 360
    panels = "".join(
        f'<g transform="translate({index * width},0)">{_panel(kind, scaling, width, height)}</g>'
        for index, (kind, scaling) in enumerate(scalings.items())
    )
    size = f'width="{width * len(scalings)}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">{panels}</svg>\n'


def _panel(kind: str, scaling: Scaling, width: int, height: int) -> str:
    left, bottom, right, top = 50, height - 40, width - 20, 40
    lines = {curve.strategy: speed_ups(scaling, curve) for curve in scaling.curves}
    most = max((max(ranks, speed) for line in lines.values() for ranks, speed in line), default=2.0)
    scale_x, scale_y = (right - left) / math.log2(max(most, 2)), (bottom - top) / math.log2(max(most, 2))

    def place(ranks: float, speed: float) -> tuple[float, float]:
        return left + scale_x * math.log2(ranks), bottom - scale_y * math.log2(max(speed, 1.0))

    (x0, y0), (x1, y1) = place(1, 1), place(most, most)
    parts = [
        f'<text x="{left}" y="20" font-size="13">{escape(kind)} scaling: speed-up over ranks</text>',
        f'<line x1="{x0}" y1="{y0}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="#bbb" stroke-dasharray="4"/>',
    ]
    for power in range(0, math.floor(math.log2(max(most, 2))) + 1, 2):
        x, y = place(2**power, 2**power)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{2**power}</text>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{2**power}</text>')
    for index, (colour, curve) in enumerate(zip(COLOURS, scaling.curves, strict=False)):
        parts += _line(curve, [place(*point) for point in lines[curve.strategy]], colour)
        parts.append(f'<text x="{left + 8}" y="{top + 14 * (index + 1)}" fill="{colour}">{escape(_key(curve))}</text>')
    return "".join(parts)


def _line(curve: Curve, places: list[tuple[float, float]], colour: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    elements = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    reached = [point.ranks for point in curve.points if point.ranked is not None]
    if curve.limit is not None and curve.limit.ranks in reached:
        x, y = places[reached.index(curve.limit.ranks)]
        elements.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{curve.limit.term}</title></circle>'
        )
    return elements


def _key(curve: Curve) -> str:
    return curve.strategy if curve.limit is None else f"{curve.strategy}: {curve.limit.ranks}, {curve.limit.term}"
