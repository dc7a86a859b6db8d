"""The reducer of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from convmesh.dist import OpenMesh
from convmesh.gradients.hierarchical import HierarchicalReducer
from convmesh.gradients.low_rank import LowRankReducer
from convmesh.gradients.reduction import AxesOf, GradientReducer
from convmesh.gradients.root_update import BroadcastReducer
from convmesh.gradients.scattered import ShardedReducer
from convmesh.plans.summing import Reduction, Summing

_REDUCERS: Mapping[Reduction, type[GradientReducer]] = {
    "bucketed": GradientReducer,
    "sharded": ShardedReducer,
    "broadcast": BroadcastReducer,
}


def reducer_of(summing: Summing) -> Callable[..., GradientReducer]:
    """What makes a plan's reducers, given a mesh and the axes of each parameter."""
    if summing.low_rank:
        return partial(LowRankReducer, rank=summing.low_rank)
    dtype = torch.bfloat16 if summing.compression == "bf16" else None
    if summing.reduction == "hierarchical":
        return partial(HierarchicalReducer, ranks_per_host=summing.ranks_per_host, dtype_reduce=dtype)
    return partial(_REDUCERS[summing.reduction], dtype_reduce=dtype)


def reducer_for(
    model: nn.Module, sum_axes: Mapping[str, tuple[str, ...]], mesh: OpenMesh, summing: Summing
) -> GradientReducer:
    """The reducer of a model's parameters, in the order in which forward uses them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    axes_of: AxesOf = [(parameters[weight], axes) for weight, axes in sum_axes.items() if weight in parameters]
    watched = {"net": model} if summing.reduction == "broadcast" else {}
    return reducer_of(summing)(mesh, axes_of, **watched)
