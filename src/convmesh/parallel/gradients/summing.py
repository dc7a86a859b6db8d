"""Which reducer a plan means, and what it sends: found from the reducer itself, without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from convmesh.dist import OpenMesh
from convmesh.parallel.gradients.broadcast import BroadcastReducer
from convmesh.parallel.gradients.reduction import AxesOf, GradientReducer
from convmesh.parallel.gradients.scattered import ShardedReducer
from convmesh.parallel.recorder import recorded
from convmesh.plan import Transfer, WeightProgram
from convmesh.plan.plan import Reduction

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


def reduction_transfers(
    weights: Sequence[WeightProgram], sum_axes: Mapping[str, tuple[str, ...]], mesh: OpenMesh, name: Reduction
) -> tuple[Transfer, ...]:
    """What one rank sends after a backward pass in which every weight got a gradient."""
    held = {weight.name: weight for weight in weights}
    axes_of = [(_parameter(held[weight]), axes) for weight, axes in sum_axes.items()]
    reducer = REDUCERS[name](mesh, axes_of)
    for parameter, _ in axes_of:
        parameter.grad = torch.empty_like(parameter)
    with recorded(mesh) as steps:
        reducer.reduce_now()
    reducer.close()
    return tuple(step for step in steps if isinstance(step, Transfer))


def _parameter(weight: WeightProgram) -> nn.Parameter:
    return nn.Parameter(torch.empty(weight.local_shape, dtype=getattr(torch, weight.dtype), device="meta"))
