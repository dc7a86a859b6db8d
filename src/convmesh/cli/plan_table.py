"""The result of a search as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convmesh.layout import Mesh
from convmesh.oracle.search import Found, Ranked, RefusalKind, Rejected
from convmesh.oracle.search.why_best import why

if TYPE_CHECKING:
    from convmesh.cli.plan_verb import PlanOptions

HEADINGS = ("step", "eff.", "exposed", "memory", "sent", "energy")
EXPLAINED = (
    "eff.: efficiency, the time of one device, had it the memory, over the time of all devices\n"
    "exposed: transfers that work waits for; memory, sent: of the rank with most; energy: of all ranks"
)
MEANS = {
    "+": "optimiser states sharded to fit the memory",
    "*": "activations computed again to fit the memory",
    "!": "tight: with the gaps that the allocator usually leaves it would not fit",
}

REJECTED_OF_EACH = 2
"""Of each strategy, how many meshes that were rejected are shown."""


def terminal() -> Console:
    """Without a terminal lines are as long as they need to be: others may read them."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def duration(seconds: float, digits: int = 4) -> str:
    """In seconds or milliseconds."""
    return scaled(seconds, "s", digits, {1.0: "", 1e-3: "m"})


def size(bytes_: float) -> str:
    """In powers of 1024, as memory is counted."""
    return scaled(bytes_, "iB", 3, {2.0**30: "G", 2.0**20: "M", 2.0**10: "K"})


def scaled(value: float, unit: str, digits: int, prefixes: Mapping[float, str]) -> str:
    """A figure with the first prefix, of those from large to small, that leaves a digit before the point."""
    factor = next((factor for factor in prefixes if value >= factor), min(prefixes))
    figure = value / factor
    whole = f"{figure:.0f}" if figure >= 10 ** (digits - 1) else f"{figure:.{digits}g}"
    return f"{whole} {prefixes[factor]}{unit}"


DECIMAL = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: ""}


def mesh_text(mesh: Mesh) -> str:
    return " ".join(f"{name}={extent}" for name, extent in mesh.axes.items()) or "one device"


def show(options: PlanOptions, found: Found, shape: tuple[int, ...], path: Path) -> None:
    """Ranked plans, the winner's reasons, what was rejected, and where the plan is."""
    console = terminal()
    console.print(f"{options.model} {'×'.join(map(str, shape))} on {options.gpus} × {options.system}")
    console.print(_table(found, options.top))
    console.print(escape(_legend(found.plans[: options.top])), style="dim", soft_wrap=True)
    for reason in why(found):
        console.print(f"[green]·[/green] {escape(reason)}", soft_wrap=True)
    _show_rejected(console, found)
    seconds = found.best.prediction.seconds
    interval = f"{duration(seconds.low, 3)} to {duration(seconds.high, 3)}"
    console.print(f"[dim]times rest on: {seconds.basis}; the best step takes {interval}[/dim]", soft_wrap=True)
    console.print(f"plan saved to {escape(str(path))}", soft_wrap=True)


def _table(found: Found, top: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("strategy", "mesh"):
        table.add_column(heading)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for ranked in found.plans[:top]:
        table.add_row(*_cells(found, ranked))
    return table


def _cells(found: Found, ranked: Ranked) -> list[str]:
    prediction = ranked.prediction
    return [
        ranked.strategy + means(ranked),
        mesh_text(ranked.mesh),
        duration(prediction.seconds_step),
        f"{found.efficiency(ranked):.0%}",
        duration(prediction.parts.exposed.value, 3),
        size(prediction.bytes_memory),
        scaled(prediction.bytes_sent, "B", 3, DECIMAL),
        scaled(prediction.joules_step, "J", 3, DECIMAL),
    ]


def means(ranked: Ranked) -> str:
    """Marks of what a plan does to hold less, and whether that may not be enough."""
    needed = max(memory.bytes_reserved for memory in ranked.prediction.memory.values())
    marks = {
        "+": ranked.plan.reduction == "sharded",
        "*": bool(ranked.plan.checkpoint),
        "!": needed > float(ranked.prediction.system.device.bytes_memory),
    }
    return "".join(mark for mark, holds in marks.items() if holds)


def _legend(plans: Sequence[Ranked]) -> str:
    marks = "".join(map(means, plans))
    return "\n".join([EXPLAINED, *(f"{mark} {meaning}" for mark, meaning in MEANS.items() if mark in marks)])


def _show_rejected(console: Console, found: Found) -> None:
    """Some refusals of each strategy, and one line for all its meshes that were not evaluated."""
    untried = [one for one in found.rejected if one.refusal.kind is RefusalKind.NOT_EVALUATED]
    refused = [one for one in found.rejected if one.refusal.kind is not RefusalKind.NOT_EVALUATED]
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
    found = []
    for strategy, listed in by_strategy.items():
        found += [f"{strategy} on {mesh_text(one.mesh)}: {one.reason}" for one in listed[:most]]
        if len(listed) > most:
            found[-1] += f" (and {len(listed) - most} more meshes)"
    return found
