"""Normalisation over the last dims, cut or not, and of vectors along a dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.dist import weights_over
from convmesh.errors import UnsupportedError
from convmesh.ops.core.by_samples import by_samples, learns_partly
from convmesh.ops.core.precision import as_autocast_asks, wide
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.norm.moments import Population
from convmesh.ops.norm.normalise import Normaliser, normalise
from convmesh.ops.norm.rows import rows_of_groups, statistics

Param = torch.Tensor | None


def _is_of_samples(
    x: Sharded, normalized_shape: Sequence[int], weight: Param = None, bias: Param = None, eps: float = 1e-5
) -> bool:
    del eps
    return len(normalized_shape) < len(x.layout.cuts) and learns_partly(x, weight, bias)


by_samples(F.layer_norm, when=_is_of_samples)


@implements(F.layer_norm)
def layer_norm(
    x: Sharded, normalized_shape: Sequence[int], weight: Param = None, bias: Param = None, eps: float = 1e-5
) -> Sharded:
    """Statistics over the last dims; each rank uses its own part of the elementwise parameters."""
    dims = _last_dims(x, normalized_shape)
    x = as_autocast_asks(x)
    axes = x.layout.axes_of(dims)
    weight, bias = weights_over(x.mesh, x.layout.axes, weight, bias)
    if not axes:
        return x.like(F.layer_norm(x.local, list(normalized_shape), weight, bias, eps))
    population = Population(x.mesh, axes, math.prod(x.shape[dim] for dim in dims))
    rows = rows_of_groups(x.local, math.prod(x.local.shape[: dims[0]]), 1, 1, x.device_kind)
    result = normalise(rows, statistics(rows, population), (None, None), Normaliser(population, eps))
    here = x.box.slices()[dims[0] :]
    return x.like(_affine(result.view(x.local.shape), *(None if p is None else p[here] for p in (weight, bias))))


def _affine(normalised: torch.Tensor, weight: Param, bias: Param) -> torch.Tensor:
    dtype = normalised.dtype
    if weight is None:
        return normalised if bias is None else normalised + bias.to(dtype)
    scaled = normalised * weight.to(dtype)
    return scaled if bias is None else scaled + bias.to(dtype)


@implements(F.rms_norm, torch.rms_norm)
def rms_norm(x: Sharded, normalized_shape: Sequence[int], weight: Param = None, eps: float | None = None) -> Any:
    """Division by the root of the mean square over the last dims."""
    dims = _last_dims(x, normalized_shape)
    smallest = torch.finfo(x.dtype).eps if eps is None else eps
    typed: Any = x.like(x.local.to(wide(x.dtype)))
    result = typed * torch.rsqrt((typed * typed).mean(dims, keepdim=True) + smallest)
    return (result if weight is None else result * weight).to(x.dtype)


def _last_dims(x: Sharded, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    first = x.dim() - len(normalized_shape)
    if not normalized_shape or first < 0 or tuple(x.shape[first:]) != tuple(normalized_shape):
        raise UnsupportedError(
            f"`normalized_shape` (={tuple(normalized_shape)}) must be the last dims of the input, {tuple(x.shape)}."
        )
    return tuple(range(first, x.dim()))


@implements(F.normalize)
def normalize(x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Any:
    """Vectors along `dim` scaled to length 1."""
    del out  # refused for every operator
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp(min=eps)


@implements(F.local_response_norm)
def local_response_norm(x: Sharded, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Sharded:
    """Normalisation over neighbouring channels; every rank needs all of them."""
    x = x.with_whole([1])
    return x.like(F.local_response_norm(x.local, size, alpha, beta, k))
