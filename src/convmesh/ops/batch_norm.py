"""Batch normalisation over the global batch: `F.batch_norm` and the nn.BatchNorm modules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from convmesh.errors import UnsupportedError
from convmesh.ops.channel_params import channel_buffers, channel_params
from convmesh.ops.moments import Population
from convmesh.ops.norm import Normaliser, apply_moments, normalise, per_row
from convmesh.ops.registry import implements
from convmesh.ops.rows import rows_of_channels, statistics
from convmesh.ops.sharded import Sharded

Buffer = torch.Tensor | None


@implements(F.batch_norm, takes_cut_weights=True)
def batch_norm(
    x: Sharded,
    running_mean: Buffer,
    running_var: Buffer,
    weight: Buffer = None,
    bias: Buffer = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Sharded:
    """Statistics of all samples and all of space, on whatever ranks; running statistics are updated on each rank."""
    if not training:
        return normalise_given(x, running_mean, running_var, weight, bias, eps)
    dims = (0, *range(2, x.dim()))
    population = Population(x.mesh, x.layout.axes_of(dims), math.prod(x.shape[dim] for dim in dims))
    require_several(population.count, x)
    rows = rows_of_channels(x.local)
    weight, bias = channel_params(x, weight, bias)
    running_mean, running_var = channel_buffers(x, running_mean, running_var)
    if (
        population.is_here and x.local.numel() and rows.shape[::2] == (1, 1)
    ):  # torch's own kernels do as well, in fewer calls
        return x.like(F.batch_norm(x.local, running_mean, running_var, weight, bias, True, momentum, eps))
    moments = statistics(rows, population)
    update_running(running_mean, running_var, moments, population.count, momentum)
    params = (per_row(weight, rows.shape), per_row(bias, rows.shape))
    return x.like(normalise(rows, moments, params, Normaliser(population, eps)).view(x.local.shape))


def normalise_given(x: Sharded, mean: Buffer, variance: Buffer, weight: Buffer, bias: Buffer, eps: float) -> Sharded:
    """Normalisation with statistics that every rank has: nothing travels but the parameters' gradients."""
    if mean is None or variance is None:
        raise UnsupportedError(
            "`running_mean` and `running_var` must both be given to normalise without the input's own statistics."
        )
    mean, variance = channel_buffers(x, mean, variance)
    assert mean is not None
    assert variance is not None
    rows = rows_of_channels(x.local)
    moments = rows.spread(torch.stack([mean, variance]).view(2, 1, -1, 1))
    weight, bias = (per_row(p, rows.shape) for p in channel_params(x, weight, bias))
    return x.like(apply_moments(rows, moments[0], moments[1], (weight, bias), eps).view(x.local.shape))


def require_several(values: int, x: Sharded) -> None:
    """Refuse what torch refuses: the variance of a single value."""
    if values == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")


@torch.no_grad()
def update_running(mean: Buffer, variance: Buffer, moments: torch.Tensor, count: int, momentum: float) -> None:
    """Move running statistics towards those of a batch, with the unbiased variance, as torch does."""
    if mean is not None:
        mean.mul_(1 - momentum).add_(moments[0].flatten(), alpha=momentum)
    if variance is not None:
        variance.mul_(1 - momentum).add_(moments[1].flatten(), alpha=momentum * count / max(1, count - 1))
