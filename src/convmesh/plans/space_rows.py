"""How far space can be cut: the rows that ranks share, and the fewest that one may have."""

from __future__ import annotations

from convmesh.layout.mesh import space_axes
from convmesh.plans.steps import Shape

LEAST_ROWS = 2
"""Rows that a rank has at least along a cut dim of space."""


def rows_by_axis(given: Shape, made: Shape) -> dict[str, int]:
    """By axis of space: the smaller extent of a layer's input and output, which is what its ranks share."""
    axes = space_axes(len(given) - 2)
    return dict(zip(axes, map(min, given[2:], made[2:]), strict=False))
