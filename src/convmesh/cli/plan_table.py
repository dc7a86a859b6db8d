"""Shows a search result as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convmesh.layout import Mesh
from convmesh.oracle.search import Ranked, RefusalKind, Rejected, SearchResult
from convmesh.oracle.search.why_best import why

if TYPE_CHECKING:
    from convmesh.cli.plan_verb import PlanOptions

HEADINGS = ("step", "eff.", "exposed", "memory", "sent", "energy")
EXPLAINED = (
    "eff.: efficiency, the time on one device with enough memory over the total time of all devices\n"
    "exposed: transfers not hidden by computation; memory, sent: largest rank's; energy: all ranks'"
)
MARKS = {
    "+": "optimiser states sharded to fit the memory",
    "*": "activations recomputed to fit the memory",
    "!": "tight: would not fit with the allocator's usual fragmentation",
}

REJECTED_OF_EACH = 2
"""How many rejected meshes to show for each strategy."""


def terminal() -> Console:
    """A console that wraps lines only on a terminal: other programs may read the output."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def duration(seconds: float, digits: int = 4) -> str:
    """A time in seconds or milliseconds."""
    return scaled(seconds, "s", digits, {1.0: "", 1e-3: "m"})


def size(bytes_: float) -> str:
    """A size in powers of 1024."""
    return scaled(bytes_, "iB", 3, {2.0**30: "G", 2.0**20: "M", 2.0**10: "K"})


def scaled(value: float, unit: str, digits: int, prefixes: Mapping[float, str]) -> str:
    """The value with the largest prefix that leaves a digit before the point; `prefixes` run from large to small."""
    factor = next((factor for factor in prefixes if value >= factor), min(prefixes))
    figure = value / factor
    whole = f"{figure:.0f}" if figure >= 10 ** (digits - 1) else f"{figure:.{digits}g}"
    return f"{whole} {prefixes[factor]}{unit}"


DECIMAL = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: ""}


def mesh_text(mesh: Mesh) -> str:
    return " ".join(f"{name}={extent}" for name, extent in mesh.axes.items()) or "one device"


def show(options: PlanOptions, result: SearchResult, shape: tuple[int, ...], path: Path) -> None:
    """Print the ranked plans, why the best won, what was rejected, and where the plan was saved."""
    console = terminal()
    console.print(f"{options.model} {'×'.join(map(str, shape))} on {options.gpus} × {options.system}")
    console.print(_table(result, options.top))
    console.print(escape(_legend(result.plans[: options.top])), style="dim", soft_wrap=True)
    for reason in why(result):
        console.print(f"[green]·[/green] {escape(reason)}", soft_wrap=True)
    _show_rejected(console, result)
    seconds = result.best.prediction.seconds
    interval = f"{duration(seconds.low, 3)} to {duration(seconds.high, 3)}"
    console.print(f"[dim]times based on {seconds.basis}; the best plan's step takes {interval}[/dim]", soft_wrap=True)
    console.print(f"plan saved to {escape(str(path))}", soft_wrap=True)


def _table(result: SearchResult, top: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("strategy", "mesh"):
        table.add_column(heading)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for ranked in result.plans[:top]:
        table.add_row(*_cells(result, ranked))
    return table


def _cells(result: SearchResult, ranked: Ranked) -> list[str]:
    prediction = ranked.prediction
    return [
        ranked.strategy + memory_marks(ranked),
        mesh_text(ranked.mesh),
        duration(prediction.seconds_step),
        f"{result.efficiency(ranked):.0%}",
        duration(prediction.parts.exposed.value, 3),
        size(prediction.bytes_memory),
        scaled(prediction.bytes_sent, "B", 3, DECIMAL),
        scaled(prediction.joules_step, "J", 3, DECIMAL),
    ]


def memory_marks(ranked: Ranked) -> str:
    """Marks for how a plan saves memory and whether it is still tight."""
    needed = max(memory.bytes_reserved for memory in ranked.prediction.memory.values())
    marks = {
        "+": ranked.plan.reduction == "sharded",
        "*": bool(ranked.plan.checkpoint),
        "!": needed > float(ranked.prediction.system.device.bytes_memory),
    }
    return "".join(mark for mark, applies in marks.items() if applies)


def _legend(plans: Sequence[Ranked]) -> str:
    marks = "".join(map(memory_marks, plans))
    return "\n".join([EXPLAINED, *(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in marks)])


def _show_rejected(console: Console, result: SearchResult) -> None:
    """Print a few rejected meshes of each strategy, and one line for all its meshes that were not evaluated."""
    untried = [one for one in result.rejected if one.refusal.kind is RefusalKind.NOT_EVALUATED]
    refused = [one for one in result.rejected if one.refusal.kind is not RefusalKind.NOT_EVALUATED]
    lines = [*_some(refused, REJECTED_OF_EACH), *_some(untried, 1)]
    if lines:
        console.print(f"rejected: {len(refused)}; not evaluated: {len(untried)}", style="dim")
    for line in lines:
        console.print(f"  {escape(line)}", style="dim", soft_wrap=True)


def _some(rejected: Sequence[Rejected], most: int) -> list[str]:
    """The first few of each strategy, and how many more there are."""
    by_strategy: dict[str, list[Rejected]] = {}
    for one in rejected:
        by_strategy.setdefault(one.strategy, []).append(one)
    lines = []
    for strategy, listed in by_strategy.items():
        lines += [f"{strategy} on {mesh_text(one.mesh)}: {one.reason}" for one in listed[:most]]
        if (more := len(listed) - most) > 0:
            lines[-1] += f" (and {more} more {'mesh' if more == 1 else 'meshes'})"
    return lines
