"""The splits that a layer may take on a mesh: what each axis could cut there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from convmesh.graph import Graph, Node
from convmesh.layout import Mesh
from convmesh.layout.channels import groups_divide
from convmesh.layout.mesh import CHANNEL_AXES, SPACE_AXES
from convmesh.plans import Split
from convmesh.plans.presets import CUTS_CHANNELS
from convmesh.plans.space_rows import LEAST_ROWS, rows_by_axis
from convmesh.plans.steps import Shape

MOST_SPLITS = 5
"""Of a layer; those come first in which axes cut what they are named for, and all axes of space do alike."""

MOST_INPUT = 4
"""How many times as large as its weight a layer's input may be, if the weight is cut by an axis for something else."""

HOME = {"data": "sample", **{name: name for name in SPACE_AXES}, **dict.fromkeys(CHANNEL_AXES, "channel")}
"""What each axis is named for."""


def splits_of(node: Node, graph: Graph, mesh: Mesh, most: int = MOST_SPLITS) -> list[Split]:
    """Splits of one layer. An axis cuts what it is named for, or samples, or channels; nothing only where it must."""
    given, made = graph.node(node.inputs[0]).outputs[0].shape, node.outputs[0].shape
    weights = sum(weight.elements for weight in node.weights if weight.learns) if node.kind in CUTS_CHANNELS else 0
    uses = [_uses(axis, mesh, given, made, weights) for axis in mesh.axes]
    groups = int(str(node.options.get("groups", 1)))
    found: dict[Split, tuple[int, float]] = {}
    for chosen in itertools.product(*uses):
        pairs = list(zip(mesh.axes, chosen, strict=True))
        split = _split(pairs)
        if _fits(split, mesh, given, made, groups):
            found.setdefault(split, (_idle(pairs, weights), _strangeness(pairs)))
    least = min(idle for idle, _ in found.values())
    busy = [split for split, (idle, _) in found.items() if idle == least]
    return sorted(busy, key=lambda split: found[split])[:most]


def _idle(pairs: Sequence[tuple[str, str | None]], weights: int) -> int:
    """How many axes cut nothing; channels stay cut as they come where there is no weight to cut."""
    return sum(dim is None and not (axis in CHANNEL_AXES and not weights) for axis, dim in pairs)


def _strangeness(pairs: Sequence[tuple[str, str | None]]) -> float:
    """How many kinds of axes cut what they are not named for; half more where axes of space do differently."""
    moved = {("space" if axis in SPACE_AXES else axis, dim) for axis, dim in pairs if dim not in (HOME[axis], None)}
    at_home = any(axis in SPACE_AXES and dim == axis for axis, dim in pairs)
    return len(moved) + 0.5 * (at_home and any(kind == "space" for kind, _ in moved))


def _uses(axis: str, mesh: Mesh, given: Shape, made: Shape, weights: int) -> list[str | None]:
    """What an axis may cut of a layer: dims, or None for nothing."""
    ranks, rows = mesh.axes[axis], rows_by_axis(given, made)
    dims: list[str | None] = [None]
    if axis in SPACE_AXES and rows.get(axis, 0) >= LEAST_ROWS * ranks:
        dims.append(axis)
    if given[0] >= ranks:
        dims.append("sample")
    if weights and made[1] >= ranks and (axis in CHANNEL_AXES or _is_worth(ranks, mesh, given, weights)):
        dims.append("channel")
    return dims


def _is_worth(ranks: int, mesh: Mesh, given: Shape, weights: int) -> bool:
    """Whether to look at cutting a layer's weight in place of its input: if a group's input is not far larger."""
    return math.prod(given) * ranks <= MOST_INPUT * weights * mesh.size


def _split(pairs: Sequence[tuple[str, str | None]]) -> Split:
    cut: dict[str, tuple[str, ...]] = {}
    for axis, dim in pairs:
        if dim is not None:
            cut[dim] = (*cut.get(dim, ()), axis)
    return Split(**cut)  # type: ignore[arg-type]


def _fits(split: Split, mesh: Mesh, given: Shape, made: Shape, groups: int) -> bool:
    channels = mesh.extent(split.channel)
    return given[0] >= mesh.extent(split.sample) and made[1] >= channels and groups_divide(groups, channels)
