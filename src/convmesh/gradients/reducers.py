"""The reducer of a plan."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from convmesh.dist import OpenMesh
from convmesh.gradients.reduction import AxesOf, GradientReducer
from convmesh.gradients.root_update import BroadcastReducer
from convmesh.gradients.scattered import ShardedReducer
from convmesh.plans.plan import Reduction

REDUCERS: Mapping[Reduction, type[GradientReducer]] = {
    "bucketed": GradientReducer,
    "sharded": ShardedReducer,
    "broadcast": BroadcastReducer,
}


def reducer_for(
    model: nn.Module, sum_axes: Mapping[str, tuple[str, ...]], mesh: OpenMesh, name: Reduction
) -> GradientReducer:
    """The reducer of a model's parameters, in the order in which forward uses them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    axes_of: AxesOf = [(parameters[weight], axes) for weight, axes in sum_axes.items() if weight in parameters]
    if name == "broadcast":
        return BroadcastReducer(mesh, axes_of, model)
    return REDUCERS[name](mesh, axes_of)
