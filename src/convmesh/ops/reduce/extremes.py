"""Largest and smallest values and their indices, over any dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from convmesh.dist import all_reduce
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.reduce.partials import Dims, has_none_of, no_partial, reduced, reduced_dims, reduces, side_by_side

_T = torch.Tensor
Pick = Callable[..., Any]


@reduces(torch.amax, _T.amax)
def amax(x: Sharded, dim: Dims = None, keepdim: bool = False) -> Sharded:
    """`torch.amax`: equal largest values share the gradient."""
    return _extreme(x, torch.amax, dim, keepdim)


@reduces(torch.amin, _T.amin)
def amin(x: Sharded, dim: Dims = None, keepdim: bool = False) -> Sharded:
    """`torch.amin`: equal smallest values share the gradient."""
    return _extreme(x, torch.amin, dim, keepdim)


def _extreme(x: Sharded, pick: Pick, dim: Dims, keepdim: bool) -> Sharded:
    dims = reduced_dims(x, dim)
    local: torch.Tensor = _Extreme.apply(x.local, x, pick, dims)
    return reduced(x, local, dims, keepdim)


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, x: Sharded, pick: Pick, dims: tuple[int, ...]) -> torch.Tensor:
        x = x.like(local)
        partial = no_partial(x, dims) if has_none_of(x, dims) else pick(local, dims, keepdim=True)
        result: torch.Tensor = pick(side_by_side(x, partial, dims), dims, keepdim=True)
        ctx.save_for_backward(local, result)
        ctx.mesh, ctx.axes, ctx.dims = x.mesh, x.layout.axes_of(dims), dims
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        local, result = ctx.saved_tensors
        tied = local == result
        ties = all_reduce(tied.sum(ctx.dims, keepdim=True), ctx.mesh, ctx.axes)
        return tied * (grad / ties), None, None, None


@reduces(torch.max, _T.max)
def largest(x: Any, dim: Any = None, keepdim: bool = False, **other: Any) -> Any:
    """`torch.max` in its three forms: of everything, along a dim with indices, of two tensors."""
    return _three_forms(x, dim, keepdim, torch.max, torch.maximum, **other)


@reduces(torch.min, _T.min)
def smallest(x: Any, dim: Any = None, keepdim: bool = False, **other: Any) -> Any:
    """`torch.min` in its three forms."""
    return _three_forms(x, dim, keepdim, torch.min, torch.minimum, **other)


def _three_forms(x: Any, dim: Any, keepdim: bool, pick: Pick, of_two: Pick, other: Any = None) -> Any:
    second = dim if other is None else other
    if isinstance(second, (Sharded, torch.Tensor)):
        return of_two(x, second)
    if dim is None:
        return _extreme(x, torch.amax if pick is torch.max else torch.amin, None, False)
    (dim,) = reduced_dims(x, int(dim)) or (0,)
    values, indices = _with_index(x, dim, pick)
    result = getattr(torch.return_types, pick.__name__)
    return result([reduced(x, local, (dim,) if x.dim() else (), keepdim) for local in (values, indices)])


def _with_index(x: Sharded, dim: int, pick: Pick) -> tuple[torch.Tensor, torch.Tensor]:
    """The extreme along `dim` and its global index, the first of equal values; the gradient goes to that index."""
    if x.dim() == 0:
        values, indices = pick(x.local, 0)
        return values, indices
    if has_none_of(x, (dim,)):
        values = no_partial(x, (dim,))
        indices = values.new_empty(values.shape, dtype=torch.int64)
    else:
        values, indices = pick(x.local, dim, keepdim=True)
        indices = indices + x.box.spans[dim].start
    indices = side_by_side(x, indices, (dim,))
    values, part = pick(side_by_side(x, values, (dim,)), dim, keepdim=True)
    return values, indices.gather(dim, part)


@reduces(torch.argmax, _T.argmax)
def argmax(x: Sharded, dim: int | None = None, keepdim: bool = False) -> Sharded:
    """`torch.argmax`: the first of equals; without `dim` the index into the flattened global tensor."""
    return _first_index(x, dim, keepdim, torch.max)


@reduces(torch.argmin, _T.argmin)
def argmin(x: Sharded, dim: int | None = None, keepdim: bool = False) -> Sharded:
    """`torch.argmin`."""
    return _first_index(x, dim, keepdim, torch.min)


@torch.no_grad()
def _first_index(x: Sharded, dim: int | None, keepdim: bool, pick: Pick) -> Sharded:
    dims = reduced_dims(x, dim)
    if dim is None or x.dim() == 0:
        return reduced(x, _first_flat_index(x.detach(), dims, pick), dims, keepdim)
    return reduced(x, _with_index(x.detach(), dims[0], pick)[1], dims, keepdim)


def _first_flat_index(x: Sharded, dims: Sequence[int], pick: Pick) -> torch.Tensor:
    if has_none_of(x, dims):
        values = no_partial(x, dims)
        places = values.new_empty(values.shape, dtype=torch.int64)
    else:
        value, place = pick(x.local.reshape(-1), 0)
        values, places = value.reshape([1] * x.dim()), _global_place(x, place).reshape([1] * x.dim())
    values, places = (side_by_side(x, partial, dims).reshape(-1) for partial in (values, places))
    best = pick(values)
    at_best = (values == best) | (values.isnan() & best.isnan())
    return places.masked_fill(~at_best, torch.iinfo(torch.int64).max).min().reshape([1] * x.dim())


def _global_place(x: Sharded, place: torch.Tensor) -> torch.Tensor:
    """Convert an index into this rank's flattened box to one into the flattened global tensor."""
    result = torch.zeros_like(place)
    stride = 1
    for span, extent in zip(reversed(x.box.spans), reversed(x.shape), strict=True):
        result += (place % span.extent + span.start) * stride
        place = place // span.extent
        stride *= extent
    return result
