"""How much a layer has for axes to cut: samples, rows of space, filters.

The filters of recurrent layers are their hidden units, which must divide over ranks. Time is not space: each time step
waits for the one before.
"""

from __future__ import annotations

from convmesh.graph import Node
from convmesh.layout.channels import groups_divide
from convmesh.layout.layer_dims import channel_dim
from convmesh.plans.space_rows import rows_by_axis
from convmesh.plans.steps import Shape


def samples_of(node: Node, given: Shape) -> int:
    """Samples of a layer's input."""
    return given[node.sample_dim]


def rows_of(node: Node, given: Shape) -> dict[str, int]:
    """By axis of space: the rows that its ranks share."""
    return {} if node.is_recurrent else rows_by_axis(given, node.outputs[0].shape, node.channels_last)


def filters_of(node: Node) -> int:
    """Filters, features or hidden units."""
    made = node.outputs[0].shape
    return node.hidden_units if node.is_recurrent else made[channel_dim(len(made), node.channels_last)]


def uneven_channels(node: Node, ranks: int) -> str:
    """Why a layer's channels cannot be cut so many ways; empty if they can."""
    filters, groups = filters_of(node), node.options.get("groups", 1)
    if node.is_computed:
        return "its weight is computed from others"
    if not isinstance(groups, int):
        return "its number of groups is found in each run"
    if node.is_recurrent:
        return "" if filters % ranks == 0 else f"{filters} hidden units do not divide over {ranks} ranks"
    if not groups_divide(groups, ranks):
        return f"{groups} groups do not divide over {ranks} ranks"
    return "" if filters >= ranks else f"{filters} filters < {ranks} ranks"
