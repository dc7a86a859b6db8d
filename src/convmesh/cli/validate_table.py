"""Shows a validation as tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convmesh.validation import PUBLISHED, Scored, Validation

RUN = ("run", "system", "network", "precision", "strategy", "GPUs", "batch", "measured", "predicted", "accuracy")


def show(validation: Validation) -> None:
    """Print every run, then each strategy's accuracy next to ParaDL's published one."""
    console = Console(highlight=False)
    if not console.is_terminal:  # other programs may read it: do not wrap lines
        console = Console(highlight=False, width=200)
    if not validation.rows:
        console.print("no row has the role `test`: nothing to predict.")
        return
    console.print(_runs(validation))
    console.print()
    console.print(_strategies(validation))
    console.print("[dim]* contaminated: the measurement includes other work; ~ no anchor for this series[/dim]")


def _runs(validation: Validation) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in RUN:
        table.add_column(heading, justify="left" if heading in RUN[:5] else "right")
    for row in validation.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Scored) -> list[str]:
    run = row.run
    mark = ("*" if run.contaminated else "") + ("" if row.calibration.anchors else "~")
    strategy = ", ".join(f"{part}={ranks}" for part, ranks in run.strategy.items())
    names = [run.id, run.system, run.model, run.precision, strategy]
    times = [f"{seconds * 1000:.1f} ms" for seconds in (run.seconds_step, row.predicted.value)]
    return [*map(escape, names), str(run.gpus), str(run.batch), *times, f"{100 * row.accuracy:.1f} %{mark}"]


def _strategies(validation: Validation) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("strategy")
    for heading in ("runs", "accuracy", "with contaminated", "ParaDL published"):
        table.add_column(heading, justify="right")
    clean, whole = validation.by_strategy(), validation.by_strategy(contaminated=True)
    for name, mean in whole.items():
        runs = sum(row.run.kind == name for row in validation.rows)
        table.add_row(name, str(runs), _percent(clean.get(name)), _percent(mean), _published(name))
    overall = (_percent(validation.accuracy), _percent(validation.accuracy_all), _published("all"))
    table.add_row("all", str(len(validation.rows)), *overall, style="bold")
    return table


def _percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{100 * accuracy:.2f} %"


def _published(name: str) -> str:
    return f"{PUBLISHED[name]:.2f} %" if name in PUBLISHED else ""
