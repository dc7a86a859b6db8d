"""How far space can be cut: the rows that ranks share, and the fewest that one may have."""

from __future__ import annotations

from convmesh.layout.layer_dims import space_dims
from convmesh.plans.steps import Shape

LEAST_ROWS = 2
"""Rows that a rank has at least along a cut dim of space."""


def rows_by_axis(given: Shape, made: Shape, channels_last: bool = False) -> dict[str, int]:
    """By axis of space: the smaller extent of a layer's input and output, which is what its ranks share."""
    space = space_dims(len(made if channels_last else given), channels_last).items()
    return {name: min(given[dim], made[dim]) for name, dim in space if dim < min(len(given), len(made))}
