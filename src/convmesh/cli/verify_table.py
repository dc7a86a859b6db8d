"""A verification as a table on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convmesh.verification.result import Kind, LayerCheck, Verification

COLUMNS: dict[str, Kind] = {
    "output": "output", "gradient": "gradient", "weights' gradients": "weight gradient", "trained weights": "weight",
}  # fmt: skip


def show(found: Verification) -> None:
    """The verdict, what each layer differs by, and what to know about it."""
    # Without a terminal lines are as long as they need to be: others may read them.
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    for layer in found.unsupported:
        console.print(f"[red]{escape(layer.layer)}[/red] ({layer.op}): {escape(layer.reason)}", soft_wrap=True)
    if found.layers:
        console.print(_table(found))
    for note in found.notes:
        console.print(f"[dim]note: {escape(note)}[/dim]", soft_wrap=True)
    console.print(f"[{'green' if found.ok else 'red'}]{escape(found.verdict)}[/]", soft_wrap=True)


def _table(found: Verification) -> Table:
    table = Table(title="relative differences from one process", box=None, pad_edge=False)
    for heading in ("layer", "operator", *COLUMNS, ""):
        table.add_column(heading, justify="right" if heading in COLUMNS else "left", overflow="fold")
    for check in found.layers:
        table.add_row(escape(check.layer), check.op, *(_cell(check, kind) for kind in COLUMNS.values()), _mark(check))
    return table


def _cell(check: LayerCheck, kind: Kind) -> str:
    error = check.largest(kind)
    return "" if error is None else f"{error:.1e}"


def _mark(check: LayerCheck) -> str:
    return "" if check.ok else "[red]differs[/red]"
