"""Sums, means, variances, norms, products, any and all over any dims."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from convmesh.dist import all_reduce, sum_over
from convmesh.errors import UnsupportedError
from convmesh.ops.core.by_samples import by_samples, not_along_samples
from convmesh.ops.core.precision import as_autocast_asks, result_type, wide
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.norm.moments import Population, moments_over
from convmesh.ops.reduce.partials import Dims, has_none_of, no_partial, reduced, reduced_dims, reduces, side_by_side

_T = torch.Tensor

by_samples(torch.mean, _T.mean, when=not_along_samples)


@reduces(torch.sum, _T.sum)
def total(x: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Sharded:
    """`torch.sum`."""
    dims = reduced_dims(x, dim)
    partial = x.local.sum(dims, keepdim=True, dtype=dtype or (wide(x.dtype) if x.is_floating_point() else None))
    local = sum_over(partial, x.mesh, x.layout.axes_of(dims))
    if x.is_floating_point():
        local = local.to(dtype or result_type(x))
    return reduced(x, local, dims, keepdim)


@reduces(torch.mean, _T.mean)
def mean(x: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Sharded:
    """`torch.mean`."""
    wanted = dtype or x.dtype
    if not wanted.is_floating_point:
        raise UnsupportedError(f"`mean` needs a floating type, not {wanted}; pass `dtype` or convert the tensor first.")
    summed: Sharded = total(x, dim, keepdim, dtype=wide(wanted))
    return summed.like((summed.local / _count(x, reduced_dims(x, dim))).to(wanted))


def _count(x: Sharded, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims)


@reduces(torch.var, _T.var)
def var(
    x: Sharded,
    dim: Dims | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Sharded:
    """`torch.var`; as in torch, a boolean in place of `dim` means `unbiased`."""
    if isinstance(dim, bool):
        unbiased = dim
    dims = reduced_dims(x, None if isinstance(dim, bool) else dim)
    population = Population(x.mesh, x.layout.axes_of(dims), _count(x, dims))
    degrees = population.count - (float(unbiased) if correction is None else correction)
    local: torch.Tensor = _Variance.apply(x.local, dims, population, max(0.0, degrees))
    return reduced(x, local, dims, keepdim)


class _Variance(torch.autograd.Function):
    """Σ (x - mean)² / degrees. The mean minimises the sum, so no gradient flows through it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dims: tuple[int, ...], population: Population, degrees: float
    ) -> torch.Tensor:
        mean, variance = moments_over(x, dims, population).unbind()
        ctx.degrees = degrees
        ctx.save_for_backward(x, mean)
        return (variance * population.count / degrees if degrees else variance / 0.0).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, mean = ctx.saved_tensors
        return (x - mean.to(wide(x.dtype))).mul_(2 * grad / ctx.degrees).to(x.dtype), None, None, None


@reduces(torch.std, _T.std)
def std(x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
    """`torch.std`; its gradient is 0 where it is 0."""
    squared: Sharded = var(x, *args, **kwargs)
    zero = squared.local == 0
    return squared.like(squared.local.masked_fill(zero, 1).sqrt().masked_fill(zero, 0))


def _register_with_mean(function: Callable[..., Any], spread: Callable[..., Any]) -> None:
    @reduces(function)
    def split(
        x: Sharded, dim: Dims | bool = None, unbiased: bool = True, keepdim: bool = False, **options: Any
    ) -> tuple[Any, Any]:
        of_mean = None if isinstance(dim, bool) else dim
        return spread(x, dim, unbiased, keepdim, **options), mean(x, of_mean, keepdim)


_register_with_mean(torch.var_mean, var)
_register_with_mean(torch.std_mean, std)


@reduces(torch.prod, _T.prod)
def prod(x: Sharded, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Sharded:
    """`torch.prod`."""
    dims = reduced_dims(x, dim)
    x = as_autocast_asks(x)
    if dtype or not x.is_floating_point():
        x = x.like(x.local.to(dtype or torch.int64))
    partial = no_partial(x, dims) if has_none_of(x, dims) else _prod(x.local, dims)
    return reduced(x, _prod(side_by_side(x, partial, dims), dims), dims, keepdim)


def _prod(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return functools.reduce(lambda t, dim: t.prod(dim, keepdim=True), dims, x)


@reduces(torch.linalg.vector_norm)
def vector_norm(
    x: Sharded,
    ord: float = 2,  # noqa: A002 - torch's name
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Sharded:
    """`torch.linalg.vector_norm`: the norm of the ranks' norms."""
    dims = reduced_dims(x, dim)
    x = as_autocast_asks(x) if dtype is None else x.like(x.local.to(dtype))
    if math.isinf(ord):
        extreme = torch.amax if ord > 0 else torch.amin
        return extreme(torch.abs(x), dims, keepdim=keepdim)  # type: ignore[arg-type,return-value]
    length = functools.partial(torch.linalg.vector_norm, dim=dims, keepdim=True)
    partial = no_partial(x, dims) if has_none_of(x, dims) else length(x.local, ord)
    # Norm 0 counts, so its partial results are added up.
    return reduced(x, length(side_by_side(x, partial, dims), ord or 1), dims, keepdim)


@reduces(torch.norm, _T.norm)
def norm(
    x: Sharded,
    p: float | str | None = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    out: None = None,
    dtype: torch.dtype | None = None,
) -> Sharded:
    """`torch.norm` of vectors; of the matrix norms only Frobenius has a split version."""
    if (isinstance(p, str) and p != "fro") or out is not None:
        raise UnsupportedError(f"`p` (={p!r}) must be a number or 'fro', and `out` must be None.")
    result: Sharded = vector_norm(x, 2 if p is None or isinstance(p, str) else p, dim, keepdim, dtype=dtype)
    return result


@reduces(torch.any, _T.any)
def any_(x: Sharded, dim: Dims = None, keepdim: bool = False) -> Sharded:
    dims = reduced_dims(x, dim)
    return _truth(x, x.local.bool().any(dims, keepdim=True), dims, keepdim)


@reduces(torch.all, _T.all)
def all_(x: Sharded, dim: Dims = None, keepdim: bool = False) -> Sharded:
    dims = reduced_dims(x, dim)
    any_false = _truth(x, ~x.local.bool().all(dims, keepdim=True), dims, keepdim)
    return any_false.like(~any_false.local)


def _truth(x: Sharded, partial: torch.Tensor, dims: Sequence[int], keepdim: bool) -> Sharded:
    """True where `partial` is true on any rank along the axes that cut `dims`."""
    ranks = all_reduce(partial.int(), x.mesh, x.layout.axes_of(dims))
    return reduced(x, ranks > 0, dims, keepdim)


@reduces(torch.count_nonzero, _T.count_nonzero)
def count_nonzero(x: Sharded, dim: Dims = None) -> Any:
    return total(x.like(x.local.detach() != 0), dim)
