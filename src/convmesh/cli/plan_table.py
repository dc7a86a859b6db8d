"""The result of a search as a table on the terminal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convmesh.layout import Mesh
from convmesh.oracle.search import Found, Ranked
from convmesh.oracle.search.reasons import why

if TYPE_CHECKING:
    from convmesh.cli.plan import Options

GIB = 1 << 30
REJECTED_OF_EACH = 2
"""Of each strategy, how many meshes that were rejected are shown."""


def terminal() -> Console:
    """Without a terminal lines are as long as they need to be: others may read them."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def duration(seconds: float) -> str:
    """In seconds or milliseconds, to four digits."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def mesh_text(mesh: Mesh) -> str:
    return " ".join(f"{name}={extent}" for name, extent in mesh.axes.items()) or "one device"


def show(options: Options, found: Found, shape: tuple[int, ...], path: Path) -> None:
    """Ranked plans, the winner's reasons, what was rejected, and where the plan is."""
    console = terminal()
    console.print(f"{options.model} {'×'.join(map(str, shape))} on {options.gpus} × {options.system}")
    console.print(_table(found, options.top))
    for reason in why(found):
        console.print(f"[green]·[/green] {escape(reason)}", soft_wrap=True)
    _show_rejected(console, found)
    interval = found.best.prediction.seconds
    console.print(
        f"[dim]times rest on: {interval.basis}; the best step takes {interval.low * 1e3:.3g} to "
        f"{interval.high * 1e3:.3g} ms[/dim]",
        soft_wrap=True,
    )
    console.print(f"plan saved to {escape(str(path))}", soft_wrap=True)


def _table(found: Found, top: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("strategy", "mesh"):
        table.add_column(heading)
    for heading in ("step", "efficiency", "exposed", "memory", "sent", "energy"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for ranked in found.plans[:top]:
        table.add_row(*_cells(found, ranked))
    return table


def _cells(found: Found, ranked: Ranked) -> list[str]:
    prediction = ranked.prediction
    return [
        ranked.strategy,
        mesh_text(ranked.mesh),
        duration(prediction.seconds_step),
        f"{found.efficiency(ranked):.0%}",
        duration(prediction.parts.exposed.value),
        f"{prediction.bytes_memory / GIB:.3g} GiB",
        f"{prediction.bytes_sent / 1e6:.4g} MB",
        f"{prediction.joules_step:.4g} J",
        _means(ranked),
    ]


def _means(ranked: Ranked) -> str:
    """What a plan does to hold less."""
    sharded = "sharded optimiser" if ranked.plan.reduction == "sharded" else ""
    again = "activations computed again" if ranked.plan.checkpoint else ""
    return ", ".join(filter(None, (sharded, again)))


def _show_rejected(console: Console, found: Found) -> None:
    if not found.rejected:
        return
    shown: Counter[str] = Counter()
    console.print(f"rejected: {len(found.rejected)}", style="dim")
    for one in found.rejected:
        shown[one.strategy] += 1
        if shown[one.strategy] <= REJECTED_OF_EACH:
            text = f"  {one.strategy} on {mesh_text(one.mesh)}: {one.reason}"
            console.print(escape(text), style="dim", soft_wrap=True)
    for strategy, count in shown.items():
        if count > REJECTED_OF_EACH:
            console.print(f"  {strategy}: {count - REJECTED_OF_EACH} more meshes", style="dim")
