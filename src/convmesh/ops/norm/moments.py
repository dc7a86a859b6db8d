"""Means and variances of values spread over several ranks, in float64.

Moments are one tensor: mean and biased variance, stacked in a first dim of extent 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from convmesh.dist import OpenMesh, all_reduce
from convmesh.ops.core.precision import wide


@dataclass(frozen=True, slots=True)
class Population:
    """The values behind one statistic: `count` of them, spread over the ranks along `axes`."""

    mesh: OpenMesh
    axes: tuple[str, ...]
    count: int

    @property
    def is_here(self) -> bool:
        """Whether this rank has all values."""
        return self.mesh.mesh.extent(self.axes) == 1

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return all_reduce(partial, self.mesh, self.axes)


def moments_of_parts(parts: torch.Tensor, dims: Sequence[int], size: int, population: Population) -> torch.Tensor:
    """The moments of the population from those of this rank's parts of `size` values, by one all-reduce.

    `parts` is overwritten; the parts are along `dims`, which are kept with extent 1. Squares are subtracted, so a
    deviation a million times smaller than the mean is lost; `eps` hides that in normalisations.
    """
    means = parts[0]
    parts[1].addcmul_(means, means)
    averages = population.sum(parts.sum(tuple(dims), keepdim=True).mul_(size / population.count))
    mean = averages[0]
    averages[1].addcmul_(mean, mean, value=-1).clamp_(min=0)
    return averages


def moments_over(x: torch.Tensor, dims: Sequence[int], population: Population) -> torch.Tensor:
    """Moments over `dims` (kept with extent 1) of a tensor whose shard here is `x`; not differentiable.

    A second all-reduce makes it as precise as on one device, however small the variance.
    """
    (mean_here, variance_here), share = _moments_here(x, dims), _share(x, dims, population)
    mean = population.sum(mean_here * share)
    return torch.stack([mean, population.sum((variance_here + (mean_here - mean).square()) * share)])


def _moments_here(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    if not x.numel():
        return x.new_zeros([2, *(1 if dim in dims else n for dim, n in enumerate(x.shape))], dtype=torch.float64)
    variance, mean = torch.var_mean(x.to(wide(x.dtype)), tuple(dims), correction=0, keepdim=True)
    return torch.stack([mean, variance]).double()


def _share(x: torch.Tensor, dims: Sequence[int], population: Population) -> float:
    """The fraction of the population that is here."""
    here = math.prod(x.shape[dim] for dim in dims)
    return here / population.count if population.count else torch.nan
