"""A program as a table: every layer's layout, local shapes and transfers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convmesh.layout import Layout
from convmesh.plans.steps import Step, Transfer

if TYPE_CHECKING:
    from convmesh.plans.program import NodeProgram, Program

_DIM_NAMES = {3: "NCW", 4: "NCHW", 5: "NCDHW"}


@dataclass(frozen=True, slots=True)
class TableRow:
    """One layer of a step on one rank."""

    layer: str
    cut: str
    local_shape: str
    forward: str
    backward: str

    @property
    def cells(self) -> tuple[str, ...]:
        return self.layer, self.cut, self.local_shape, self.forward, self.backward


HEAD = TableRow("layer", "cut", "local shape", "sends forward", "sends backward")


def rows(program: Program) -> list[TableRow]:
    """All nodes with an output, then the gradient sums."""
    listed = [_row(node, program.rank) for node in program.nodes if node.outputs]
    sums = TableRow("(gradients)", "", "", "", sent(program.reduction))
    return [*listed, sums] if program.reduction else listed


def _row(node: NodeProgram, rank: int) -> TableRow:
    layout = node.outputs[0]
    shape = "×".join(map(str, layout.box(rank).shape)) or "()"
    return TableRow(node.layer, described(layout), shape, sent(node.forward), sent(node.backward))


def described(layout: Layout) -> str:
    """`N:data H:height`, or `whole`."""
    names = _DIM_NAMES.get(len(layout.cuts), "NC")
    parts = (
        f"{names[dim] if dim < len(names) else dim}:{'*'.join(cut.axes)}"
        for dim, cut in enumerate(layout.cuts)
        if cut.axes
    )
    return " ".join(parts) or "whole"


def sent(steps: Iterable[Step]) -> str:
    """Transfers, grouped by kind: `2 neighbour 4.0 KiB over height`."""
    by_kind: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for step in steps:
        if isinstance(step, Transfer):
            by_kind.setdefault((step.carrier, step.axes), []).append(step.bytes_sent)
    return ", ".join(f"{len(b)} {kind} {amount(sum(b))} over {'*'.join(axes)}" for (kind, axes), b in by_kind.items())


def amount(bytes_: float) -> str:
    """Bytes, with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if bytes_ < 1024:
            return f"{bytes_:.0f} {unit}" if unit == "B" else f"{bytes_:.1f} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.1f} TiB"


def render(program: Program) -> str:
    """The table as text, and a line of totals."""
    listed = [HEAD, *rows(program)]
    widths = [max(len(row.cells[column]) for row in listed) for column in range(len(HEAD.cells))]
    lines = [_line(row.cells, widths) for row in listed]
    total = ", ".join(f"{kind} {amount(bytes_)}" for kind, bytes_ in sorted(program.bytes_sent.items())) or "nothing"
    return "\n".join([*lines, f"rank {program.rank} of {program.mesh} sends in a step: {total}"])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
