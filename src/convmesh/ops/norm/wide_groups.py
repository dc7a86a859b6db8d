"""Group normalisation where groups of channels straddle ranks."""

from __future__ import annotations

import math

import torch

from convmesh.dist import copy_over, sum_over
from convmesh.ops.core.sharded import Sharded


def normalise_groups(x: Sharded, groups: int, eps: float) -> torch.Tensor:
    """This rank's shard minus the means of its groups, divided by their deviations; differentiable.

    Takes two sums over the ranks that share samples: of the values, then of their squared distances from the mean.
    """
    mean = _group_means(x, x.local, groups)
    centred = x.local - mean
    variance = _group_means(x, centred.square(), groups)
    return centred * torch.rsqrt(variance + eps)


def _group_means(x: Sharded, values: torch.Tensor, groups: int) -> torch.Tensor:
    """The mean over each group of all ranks' `values`, for every local channel, shaped to broadcast over space."""
    axes = x.layout.axes_of(range(1, x.dim()))
    channels, here = x.shape[1], x.box.spans[1]
    sums = values.sum(tuple(range(2, x.dim())), dtype=torch.promote_types(values.dtype, torch.float32))
    everywhere = torch.nn.functional.pad(sums, (here.start, channels - here.stop))
    (total,) = copy_over(x.mesh, axes, sum_over(everywhere, x.mesh, axes))
    assert total is not None
    size = channels // groups
    means = total.unflatten(1, (groups, size)).sum(2) / (size * math.prod(x.shape[2:]))
    own: torch.Tensor = means.repeat_interleave(size, 1)[:, here.slice()]
    return own.view(*own.shape, *[1] * (x.dim() - 2)).to(values.dtype)
