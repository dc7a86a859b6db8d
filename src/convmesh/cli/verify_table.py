"""Shows a verification as a table on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convmesh.verification.result import Kind, LayerCheck, Verification

COLUMNS: dict[str, Kind] = {
    "output": "output", "gradient": "gradient", "weights' gradients": "weight gradient", "trained weights": "weight",
}  # fmt: skip


def show(result: Verification) -> None:
    """Print each layer's differences, the notes and the verdict."""
    # Without a terminal, do not wrap lines: other programs may read them.
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    for layer in result.unsupported:
        at = f" at {escape(layer.line)}" if layer.line else ""
        console.print(f"[red]{escape(layer.layer)}[/red] ({layer.op}){at}: {escape(layer.reason)}", soft_wrap=True)
    if result.layers:
        console.print(_table(result))
    for note in result.notes:
        console.print(f"[dim]note: {escape(note)}[/dim]", soft_wrap=True)
    console.print(f"[{'green' if result.ok else 'red'}]{escape(result.verdict)}[/]", soft_wrap=True)


def _table(result: Verification) -> Table:
    table = Table(title="relative differences from one process", box=None, pad_edge=False)
    for heading in ("layer", "operator", *COLUMNS, ""):
        table.add_column(heading, justify="right" if heading in COLUMNS else "left", overflow="fold")
    for check in result.layers:
        table.add_row(escape(check.layer), check.op, *(_cell(check, kind) for kind in COLUMNS.values()), _mark(check))
    return table


def _cell(check: LayerCheck, kind: Kind) -> str:
    error = check.largest(kind)
    return "" if error is None else f"{error:.1e}"


def _mark(check: LayerCheck) -> str:
    return "" if check.ok else "[red]differs[/red]"
