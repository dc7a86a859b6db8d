"""The splits that a layer may take on a mesh: the dims that each axis may cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from convmesh.graph import Graph, Node
from convmesh.layout import Mesh
from convmesh.layout.channels import Sums
from convmesh.layout.mesh import CHANNEL_AXES, SPACE_AXES
from convmesh.plans import Split
from convmesh.plans.layer_extents import filters_of, rows_of, samples_of, uneven_channels
from convmesh.plans.shared_weights import may_cut, shared_algorithm
from convmesh.plans.space_rows import LEAST_ROWS
from convmesh.plans.steps import Shape

MOST_SPLITS = 5
"""Splits of a layer; first those in which axes cut the dims of their names, and all axes of space do the same."""

MOST_ON_PLANES = 3
"""The same for dense layers on tokens of two or more dims, in windows or not: sums of such layers are computed for
every pair of their splits, each with several ways to cut features."""

MOST_INPUT = 4
"""Largest ratio of a layer's input to its weight at which an axis of another name may cut the weight."""

HOME = {"data": "sample", **{name: name for name in SPACE_AXES}, **dict.fromkeys(CHANNEL_AXES, "channel")}
"""The dim that each axis is named for."""


def splits_of(node: Node, graph: Graph, mesh: Mesh, most: int = MOST_SPLITS) -> list[Split]:
    """Splits of one layer. An axis cuts the dim of its name, or samples, or channels; nothing only where it must."""
    given, made = graph.node(node.inputs[0]).outputs[0].shape, node.outputs[0].shape
    weights = sum(weight.elements for weight in node.weights if weight.learns) if may_cut(graph, node) else 0
    uses = [_uses(axis, mesh, node, given, weights) for axis in mesh.axes]
    ratings: dict[Split, tuple[int, float]] = {}
    for chosen in itertools.product(*uses):
        pairs = list(zip(mesh.axes, chosen, strict=True))
        split = _split(pairs)
        if _fits(split, mesh, node, given):
            ratings.setdefault(split, (_idle(pairs, weights), _strangeness(pairs)))
    least = min(idle for idle, _ in ratings.values())
    busy = [split for split, (idle, _) in ratings.items() if idle == least]
    on_planes = node.channels_last and len(made) > 3
    best = sorted(busy, key=lambda split: ratings[split])[: min(most, MOST_ON_PLANES) if on_planes else most]
    if node.channels_last and len(made) > 2:
        best = [variant for split in best for variant in _on_tokens(split)]
    if algorithm := shared_algorithm(graph, node):
        named = [replace(split, algorithm=algorithm) if split.algorithm == "auto" else split for split in best]
        return [split for split in named if not split.channel or split.algorithm == algorithm]
    return best


def _on_tokens(split: Split) -> list[Split]:
    """The ways to cut a dense layer's features that differ in what follows: where its output is, whole or in parts.

    Columns of the weight leave features cut, for the next layer to take by rows; rows leave sums, which go to every
    rank, to parts of the tokens or to parts of the features.
    """
    if not split.channel:
        return [split]
    rows = [replace(split, algorithm="x", sums=sums) for sums in get_args(Sums)]
    return [replace(split, algorithm="y"), *rows]


def _idle(pairs: Sequence[tuple[str, str | None]], weights: int) -> int:
    """Axes that cut nothing; axes of channels do not count in layers without a weight, which keep their input's cut."""
    return sum(dim is None and not (axis in CHANNEL_AXES and not weights) for axis, dim in pairs)


def _strangeness(pairs: Sequence[tuple[str, str | None]]) -> float:
    """The number of kinds of axes that cut another dim than their name's, plus a half if axes of space differ."""
    moved = {("space" if axis in SPACE_AXES else axis, dim) for axis, dim in pairs if dim not in (HOME[axis], None)}
    at_home = any(axis in SPACE_AXES and dim == axis for axis, dim in pairs)
    return len(moved) + 0.5 * (at_home and any(kind == "space" for kind, _ in moved))


def _uses(axis: str, mesh: Mesh, node: Node, given: Shape, weights: int) -> list[str | None]:
    """The dims of a layer that an axis may cut; None for nothing."""
    ranks = mesh.axes[axis]
    dims: list[str | None] = [None]
    if axis in SPACE_AXES and rows_of(node, given).get(axis, 0) >= LEAST_ROWS * ranks:
        dims.append(axis)
    if samples_of(node, given) >= ranks:
        dims.append("sample")
    if weights and filters_of(node) >= ranks and (axis in CHANNEL_AXES or _is_worth(ranks, mesh, given, weights)):
        dims.append("channel")
    return dims


def _is_worth(ranks: int, mesh: Mesh, given: Shape, weights: int) -> bool:
    """Whether cutting a layer's weight may pay: a group's input must not be far larger."""
    return math.prod(given) * ranks <= MOST_INPUT * weights * mesh.size


def _split(pairs: Sequence[tuple[str, str | None]]) -> Split:
    cut: dict[str, tuple[str, ...]] = {}
    for axis, dim in pairs:
        if dim is not None:
            cut[dim] = (*cut.get(dim, ()), axis)
    return Split(**cut)  # type: ignore[arg-type]


def _fits(split: Split, mesh: Mesh, node: Node, given: Shape) -> bool:
    if node.is_recurrent and len(split.channel) > 1:  # hidden units are cut by one axis
        return False
    channels = mesh.extent(split.channel)
    is_cut = not split.channel or not uneven_channels(node, channels)
    return samples_of(node, given) >= mesh.extent(split.sample) and is_cut
