"""Group and instance normalisation: statistics of each sample, over a group's channels and all of space."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from convmesh.errors import UnsupportedError
from convmesh.kernels.fusing import is_fused
from convmesh.kernels.memory_format import is_channels_last
from convmesh.ops.channels.channel_params import channel_buffers, channel_params, share_buffers
from convmesh.ops.core.precision import as_autocast_asks
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.norm.batch_norm import Buffer, normalise_given, require_several, update_running
from convmesh.ops.norm.fused_norm import FusedNorm, fused_norm, moments_here
from convmesh.ops.norm.moments import Population
from convmesh.ops.norm.normalise import Normaliser, normalise, per_row
from convmesh.ops.norm.rows import Rows, pieces, rows_of_groups, statistics
from convmesh.ops.norm.wide_groups import normalise_groups


@implements(F.group_norm, takes_cut_weights=True)
def group_norm(x: Sharded, num_groups: int, weight: Buffer = None, bias: Buffer = None, eps: float = 1e-5) -> Sharded:
    """Statistics of each sample and group of channels."""
    if num_groups < 1 or x.shape[1] % num_groups:
        raise UnsupportedError(f"`num_groups` (={num_groups}) must divide the {x.shape[1]} channels of the input.")
    x = as_autocast_asks(x)
    require_several(x.numel() // num_groups, x)  # torch counts all samples here
    weight, bias = channel_params(x, weight, bias)
    groups_here = _whole_groups(x, num_groups)
    if groups_here is None:
        return x.like(_affine(normalise_groups(x, num_groups, eps), weight, bias))
    population = _population(x, num_groups)
    if _suits_torch(x, population):
        return x.like(F.group_norm(x.local, groups_here, weight, bias, eps))
    if _would_be_copied(x):
        return x.like(_affine(_in_place_of_rows(x.local, groups_here, population, eps), weight, bias))
    rows = _rows(x, groups_here)
    return _normalised(x, rows, statistics(rows, population), (weight, bias), Normaliser(population, eps))


@implements(F.instance_norm, takes_cut_weights=True)
def instance_norm(
    x: Sharded,
    running_mean: Buffer = None,
    running_var: Buffer = None,
    weight: Buffer = None,
    bias: Buffer = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Sharded:
    """Statistics of each sample and channel."""
    if not use_input_stats:
        return normalise_given(x, running_mean, running_var, weight, bias, eps)
    population = _population(x, x.shape[1])
    require_several(population.count, x)
    weight, bias = channel_params(x, weight, bias)
    whole = (running_mean, running_var)
    running_mean, running_var = channel_buffers(x, *whole)
    untracked = running_mean is None and running_var is None
    if untracked and x.local.numel() and (is_fused() or _would_be_copied(x)):
        how = FusedNorm(tuple(range(2, x.dim())), population, eps)
        return x.like(fused_norm(x.local, moments_here(x.local, how), weight, bias, how))
    if untracked and not _lies_channels_last(x) and _suits_torch(x, population):
        return x.like(F.instance_norm(x.local, None, None, weight, bias, eps=eps))
    rows = _rows(x, x.local.shape[1])
    moments = statistics(rows, population)
    if not untracked:
        update_running(running_mean, running_var, _over_samples(x, moments), population.count, momentum)
        share_buffers(x, whole, (running_mean, running_var))
    return _normalised(x, rows, moments, (weight, bias), Normaliser(population, eps))


def _whole_groups(x: Sharded, groups: int) -> int | None:
    """How many groups of channels this rank has, if every rank has whole groups; else None."""
    size = x.shape[1] // groups
    if any(bound % size for bound in x.layout.cuts[1].partition.bounds):
        return None
    return x.box.spans[1].extent // size


def _affine(normalised: torch.Tensor, weight: Buffer, bias: Buffer) -> torch.Tensor:
    for_each = (-1, *[1] * (normalised.dim() - 2))
    scaled = normalised if weight is None else normalised * weight.view(for_each).to(normalised.dtype)
    return scaled if bias is None else scaled + bias.view(for_each).to(normalised.dtype)


def _population(x: Sharded, groups: int) -> Population:
    count = x.shape[1] // groups * math.prod(x.shape[2:])
    return Population(x.mesh, x.layout.axes_of(range(2, x.dim())), count)


def _rows(x: Sharded, groups: int) -> Rows:
    channels = x.local.shape[1] // max(1, groups)
    return rows_of_groups(x.local, x.local.shape[0], groups, channels, x.device_kind)


def _lies_channels_last(x: Sharded) -> bool:
    """Whether kernels that want the plain format would copy, on a CPU, where the others take channels-last."""
    return x.device_kind == "cpu" and is_channels_last(x.local)


def _would_be_copied(x: Sharded) -> bool:
    """Whether rows would be copies: each of several channels-last samples has its own statistics."""
    return _lies_channels_last(x) and x.local.shape[0] > 1


def _in_place_of_rows(local: torch.Tensor, groups: int, population: Population, eps: float) -> torch.Tensor:
    """The values of each sample and group normalised by elementary operators, which keep the format."""
    apart = local.unflatten(1, (groups, -1))
    how = FusedNorm(tuple(range(2, apart.dim())), population, eps)
    return fused_norm(apart, moments_here(apart, how), None, None, how).view_as(local)


def _suits_torch(x: Sharded, population: Population) -> bool:
    """Whether torch's own kernels are as good, in fewer calls: all values are here, and there are enough rows."""
    samples, channels, *space = x.local.shape
    return population.is_here and samples > 0 and channels > 0 and pieces(samples * channels, math.prod(space)) == 1


def _normalised(
    x: Sharded, rows: Rows, moments: torch.Tensor, params: tuple[Buffer, Buffer], how: Normaliser
) -> Sharded:
    samples, groups, members = rows.shape
    channels = x.local.shape[1]
    shape = (samples, channels, groups * members // max(1, channels))
    weight, bias = (per_row(p, shape) for p in params)
    even = weight is None or groups == channels
    result = normalise(rows, moments, (weight, bias), Normaliser(how.population, how.eps, even))
    return x.like(rows.restored(result, x.local.shape))


def _over_samples(x: Sharded, moments: torch.Tensor) -> torch.Tensor:
    """The averages of the samples' statistics, which running statistics follow."""
    batch = Population(x.mesh, x.layout.axes_of([0]), x.shape[0])
    return batch.sum(moments.sum(1)) / batch.count
