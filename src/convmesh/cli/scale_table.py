"""Scaling curves as tables and plots on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from convmesh.cli.plan_table import MARKS, duration, memory_marks, terminal
from convmesh.cli.scale_plot import text_plot
from convmesh.oracle.scaling_limits import Curve, ScalingPoint
from convmesh.planner.scaling import Scaling

if TYPE_CHECKING:
    from convmesh.cli.scale_verb import ScaleOptions


def show(options: ScaleOptions, scalings: Mapping[str, Scaling]) -> None:
    """Print, for each kind of scaling, a table, a plot, and the limit of each strategy."""
    console = terminal()
    for kind, scaling in scalings.items():
        console.print(_table(f"{kind} scaling of {options.model} on {options.system}", scaling))
        console.print(escape(_legend(scaling)), style="dim", soft_wrap=True)
        for line in text_plot(scaling):
            console.print(escape(line), soft_wrap=True)
        for curve in scaling.curves:
            console.print(escape(_limit(curve)), soft_wrap=True)
        console.print()


def _table(title: str, scaling: Scaling) -> Table:
    table = Table(title=title, box=None, pad_edge=False)
    for heading in ("ranks", "batch", *(curve.strategy for curve in scaling.curves)):
        table.add_column(heading, justify="right")
    for index, point in enumerate(scaling.curves[0].points):
        cells = (_cell(scaling, curve.points[index]) for curve in scaling.curves)
        table.add_row(str(point.ranks), str(point.batch), *cells)
    return table


def _cell(scaling: Scaling, point: ScalingPoint) -> str:
    if point.ranked is None:
        return "-"
    seconds = duration(point.ranked.prediction.seconds_step, 3)
    return f"{seconds}{memory_marks(point.ranked)} {scaling.efficiency(point):4.0%}"


def _legend(scaling: Scaling) -> str:
    marks = "".join(memory_marks(point.ranked) for curve in scaling.curves for point in curve.points if point.ranked)
    heading = "time per step, and efficiency against one device with enough memory"
    return "\n".join([heading, *(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in marks)])


def _limit(curve: Curve) -> str:
    if curve.limit is not None and curve.limit.ranks == 0:
        return f"{curve.strategy}: no plan; {curve.limit.reason}"
    if curve.limit is not None:
        return f"{curve.strategy}: scales to {counted(curve.limit.ranks)}; {curve.limit.reason}"
    reached = [point.ranks for point in curve.points if point.ranked]
    if not reached:
        return f"{curve.strategy}: no plan; {curve.points[-1].reason}"
    beyond = next((point.reason for point in reversed(curve.points) if not point.ranked and not point.is_gap), "")
    return f"{curve.strategy}: still scaling at {counted(reached[-1])}" + (f"; beyond that {beyond}" if beyond else "")


def counted(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
