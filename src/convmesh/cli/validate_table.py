"""A validation as tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convmesh.validation import PUBLISHED, Scored, Validation

RUN = ("run", "system", "network", "precision", "strategy", "GPUs", "batch", "measured", "predicted", "accuracy")


def show(found: Validation) -> None:
    """Every run, then strategies beside what ParaDL published."""
    console = Console(highlight=False)
    if not console.is_terminal:  # others may read it: lines as long as they need to be
        console = Console(highlight=False, width=200)
    if not found.rows:
        console.print("no row has the role `test`: there is nothing to predict.")
        return
    console.print(_runs(found))
    console.print()
    console.print(_strategies(found))
    console.print("[dim]* contaminated: measured with something else in it; ~ no anchor for this series[/dim]")


def _runs(found: Validation) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in RUN:
        table.add_column(heading, justify="left" if heading in RUN[:5] else "right")
    for row in found.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Scored) -> list[str]:
    run = row.run
    mark = ("*" if run.contaminated else "") + ("" if row.calibration.anchors else "~")
    strategy = ", ".join(f"{part}={ranks}" for part, ranks in run.strategy.items())
    names = [run.id, run.system, run.model, run.precision, strategy]
    times = [f"{seconds * 1000:.1f} ms" for seconds in (run.seconds_step, row.predicted.value)]
    return [*map(escape, names), str(run.gpus), str(run.batch), *times, f"{100 * row.accuracy:.1f} %{mark}"]


def _strategies(found: Validation) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("strategy")
    for heading in ("runs", "accuracy", "with contaminated", "ParaDL published"):
        table.add_column(heading, justify="right")
    clean, whole = found.by_strategy(), found.by_strategy(contaminated=True)
    for name, mean in whole.items():
        runs = sum(row.run.kind == name for row in found.rows)
        table.add_row(name, str(runs), _percent(clean.get(name)), _percent(mean), _published(name))
    overall = (_percent(found.accuracy), _percent(found.accuracy_all), _published("all"))
    table.add_row("all", str(len(found.rows)), *overall, style="bold")
    return table


def _percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{100 * accuracy:.2f} %"


def _published(name: str) -> str:
    return f"{PUBLISHED[name]:.2f} %" if name in PUBLISHED else ""
