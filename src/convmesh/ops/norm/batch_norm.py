"""Batch normalisation over the global batch: `F.batch_norm` and the nn.BatchNorm modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F

from convmesh.errors import UnsupportedError
from convmesh.kernels.fusing import is_fused
from convmesh.layout import Layout
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.ops.channels.channel_params import channel_buffers, channel_params, share_buffers
from convmesh.ops.core.by_samples import by_samples, learns_partly
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.norm.fused_norm import FusedNorm, fused_norm, moments_here
from convmesh.ops.norm.moments import Population
from convmesh.ops.norm.normalise import Normaliser, apply_moments, normalise, per_row
from convmesh.ops.norm.rows import has_enough_rows, rows_of_channels, statistics

Buffer = torch.Tensor | None


def _is_left_to_torch(
    x: Sharded,
    running_mean: Buffer,
    running_var: Buffer,
    weight: Buffer = None,
    bias: Buffer = None,
    training: bool = False,
    **options: float,
) -> bool:
    """Whether all values behind the statistics are here, and torch's kernel is as good as ours, in fewer calls."""
    del options
    if not training or (x.layout.axes and (not x.mesh.settings.replica_statistics or x.layout.axes != ("data",))):
        return False
    return has_enough_rows(x.local) and learns_partly(x, weight, bias, running_mean, running_var)


by_samples(F.batch_norm, when=_is_left_to_torch)


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
    """Statistics over all samples and all of space, across all ranks; every rank updates its running statistics."""
    if not training:
        return normalise_given(x, running_mean, running_var, weight, bias, eps)
    whole = (running_mean, running_var)
    parts = channel_buffers(x, *whole)
    result = _normalised(x, parts, (weight, bias), momentum, eps)
    share_buffers(x, whole, parts)
    return result


def _normalised(
    x: Sharded, running: tuple[Buffer, ...], params: tuple[Buffer, Buffer], momentum: float, eps: float
) -> Sharded:
    """Normalise by the batch's own statistics, and move this rank's `running` ones towards them."""
    dims = (0, *range(2, x.dim()))
    population = _population(x, dims)
    require_several(population.count, x)
    weight, bias = channel_params(x, *params)
    running_mean, running_var = running
    if is_fused() and x.local.numel():
        how = FusedNorm(dims, population, eps)
        measured = moments_here(x.local, how)
        update_running(running_mean, running_var, measured, population.count, momentum)
        return x.like(fused_norm(x.local, measured, weight, bias, how))
    rows = rows_of_channels(x.local, x.device_kind)
    in_pieces = rows.shape[::2] != (1, 1) and not rows.interleaved
    if population.is_here and x.local.numel() and not in_pieces:  # torch's own kernels are as good, in fewer calls
        return x.like(F.batch_norm(x.local, running_mean, running_var, weight, bias, True, momentum, eps))
    moments = statistics(rows, population)
    update_running(running_mean, running_var, moments, population.count, momentum)
    of_rows = (per_row(weight, rows.shape), per_row(bias, rows.shape))
    return x.like(rows.restored(normalise(rows, moments, of_rows, Normaliser(population, eps)), x.local.shape))


def _population(x: Sharded, dims: tuple[int, ...]) -> Population:
    """All values of a channel: in the global batch, or in this rank's data-parallel replica."""
    axes = x.layout.axes_of(dims)
    if not x.mesh.settings.replica_statistics or "data" not in x.layout.cuts[0].axes:
        return Population(x.mesh, axes, math.prod(x.shape[dim] for dim in dims))
    within = tuple(name for name in axes if name != "data")
    return Population(x.mesh, within, _replica_samples(x.layout, x.mesh.rank) * math.prod(x.shape[2:]))


@lru_cache(maxsize=LAYOUTS_KEPT)
def _replica_samples(layout: Layout, rank: int) -> int:
    (names, partition), mesh = layout.cuts[0], layout.mesh
    here = mesh.coordinates(rank)["data"]
    parts = (p for p in range(partition.parts) if mesh.places(names, p)["data"] == here)
    return sum(partition.span(p).extent for p in parts)


def normalise_given(x: Sharded, mean: Buffer, variance: Buffer, weight: Buffer, bias: Buffer, eps: float) -> Sharded:
    """Normalisation with statistics that every rank has: nothing travels but the parameters' gradients."""
    if mean is None or variance is None:
        raise UnsupportedError(
            "`running_mean` and `running_var` (=None) must both be given to normalise without the input's statistics."
        )
    mean, variance = channel_buffers(x, mean, variance)
    assert mean is not None
    assert variance is not None
    rows = rows_of_channels(x.local, x.device_kind)
    moments = rows.spread(torch.stack([mean, variance]).view(2, 1, -1, 1))
    weight, bias = (per_row(p, rows.shape) for p in channel_params(x, weight, bias))
    return x.like(rows.restored(apply_moments(rows, moments[0], moments[1], (weight, bias), eps), x.local.shape))


def require_several(values: int, x: Sharded) -> None:
    """Refuse what torch refuses: the variance of a single value."""
    if values == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")


@torch.no_grad()
def update_running(
    mean: Buffer, variance: Buffer, moments: Sequence[torch.Tensor] | torch.Tensor, count: int, momentum: float
) -> None:
    """Move running statistics towards those of a batch, with the unbiased variance, as torch does."""
    if mean is not None:
        mean.mul_(1 - momentum).add_(moments[0].flatten(), alpha=momentum)
    if variance is not None:
        variance.mul_(1 - momentum).add_(moments[1].flatten(), alpha=momentum * count / max(1, count - 1))
