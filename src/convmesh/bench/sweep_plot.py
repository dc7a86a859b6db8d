"""A batch sweep as an SVG: accuracy and time over the batch, with a line for each number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from convmesh.bench.batch_sweep import SweepPoint
from convmesh.bench.palette import COLOURS

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 300, 56, 400, 40, 260
FIGURES: dict[str, Callable[[SweepPoint], float]] = {
    "test accuracy": lambda point: point.accuracy,
    "seconds of training": lambda point: point.seconds_total,
    "samples per second": lambda point: point.samples_per_second,
}


def sweep_svg(points: Sequence[SweepPoint]) -> str:
    """One panel for each figure, side by side."""
    panels = "".join(
        f'<g transform="translate({index * WIDTH},0)">{_panel(title, figure, points)}</g>'
        for index, (title, figure) in enumerate(FIGURES.items())
    )
    size = f'width="{WIDTH * len(FIGURES)}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">{panels}</svg>\n'


def _panel(title: str, figure: Callable[[SweepPoint], float], points: Sequence[SweepPoint]) -> str:
    batches, values = sorted({point.batch for point in points}), [figure(point) for point in points]
    low, high = min(values), max(values)
    span_x, span_y = math.log(batches[-1] / batches[0]) or 1.0, (high - low) or 1.0

    def place(point: SweepPoint) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * math.log(point.batch / batches[0]) / span_x
        return x, BOTTOM - (BOTTOM - TOP) * (figure(point) - low) / span_y

    parts = [f'<text x="{LEFT}" y="20" font-size="13">{title} over batch</text>']
    parts += [_label(LEFT - 6, BOTTOM + 4, f"{low:.3g}", "end"), _label(LEFT - 6, TOP + 4, f"{high:.3g}", "end")]
    shown = {batches[0], batches[-1], batches[len(batches) // 2]}
    parts += [_label(place(p)[0], BOTTOM + 16, str(p.batch), "middle") for p in _first_of(points) if p.batch in shown]
    for index, ranks in enumerate(sorted({point.ranks for point in points})):
        colour = COLOURS[index % len(COLOURS)]
        line = [place(p) for p in sorted(points, key=lambda p: p.batch) if p.ranks == ranks]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{RIGHT - 60}" y="{TOP + 14 * index}" fill="{colour}">{ranks} ranks</text>')
    return "".join(parts)


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _first_of(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """One point for each batch size."""
    return list({point.batch: point for point in points}.values())
