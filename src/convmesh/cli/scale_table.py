"""Scaling curves as tables and plots on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from convmesh.cli.plan_table import duration, terminal
from convmesh.cli.scale_plot import text_plot
from convmesh.oracle.limits import Curve, Point
from convmesh.parallel.scaling import Scaling

if TYPE_CHECKING:
    from convmesh.cli.scale import Options


def show(options: Options, found: Mapping[str, Scaling]) -> None:
    """For each kind of scaling a table, a plot, and where each strategy stops."""
    console = terminal()
    for kind, scaling in found.items():
        console.print(_table(f"{kind} scaling of {options.model} on {options.system}", scaling))
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


def _cell(scaling: Scaling, point: Point) -> str:
    if point.ranked is None:
        return "-"
    return f"{duration(point.ranked.prediction.seconds_step)} {scaling.efficiency(point):4.0%}"


def _limit(curve: Curve) -> str:
    if curve.limit is None:
        return f"{curve.strategy}: scales as far as was looked"
    return f"{curve.strategy}: scales to {curve.limit.ranks} ranks; {curve.limit.reason}"
