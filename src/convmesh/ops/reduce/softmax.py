"""Softmax, its logarithm and log-sum-exp along a dim that may be cut: two small all-reduces instead of a gather."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from convmesh.errors import UnsupportedError
from convmesh.ops.core.across_ranks import Along
from convmesh.ops.core.by_samples import by_samples, not_along_samples
from convmesh.ops.core.precision import as_autocast_asks, wide
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.reduce.partials import Dims, reduced, reduced_dims, reduces

_T = torch.Tensor

DType = torch.dtype | None
"""The type in which to compute, and of the result; None keeps the input's."""

by_samples(F.softmax, torch.softmax, _T.softmax, when=not_along_samples)
by_samples(F.log_softmax, torch.log_softmax, _T.log_softmax, when=not_along_samples)


@reduces(F.softmax)
def functional_softmax(x: Sharded, dim: int | None = None, _stacklevel: int = 3, dtype: DType = None) -> Any:
    """`F.softmax`."""
    return softmax(x, dim, dtype)


@reduces(torch.softmax, _T.softmax, torch.special.softmax)
def softmax(x: Sharded, dim: int | None, dtype: DType = None) -> Sharded:
    """`torch.softmax`."""
    along, x = _along(x, dim, dtype)
    local: torch.Tensor = _Softmax.apply(x.local, along) if along.axes else torch.softmax(x.local, along.dims[0])
    return x.like(local)


@reduces(F.softmin)
def softmin(x: Sharded, dim: int | None = None, _stacklevel: int = 3, dtype: DType = None) -> Any:
    """`F.softmin`."""
    return softmax(x.like(-x.local), dim, dtype)


@reduces(F.log_softmax)
def functional_log_softmax(x: Sharded, dim: int | None = None, _stacklevel: int = 3, dtype: DType = None) -> Any:
    """`F.log_softmax`."""
    return log_softmax(x, dim, dtype)


@reduces(torch.log_softmax, _T.log_softmax, torch.special.log_softmax)
def log_softmax(x: Sharded, dim: int | None, dtype: DType = None) -> Sharded:
    """`torch.log_softmax`."""
    along, x = _along(x, dim, dtype)
    local: torch.Tensor = _LogSoftmax.apply(x.local, along) if along.axes else x.local.log_softmax(along.dims[0])
    return x.like(local)


@reduces(torch.logsumexp, _T.logsumexp, torch.special.logsumexp)
def logsumexp(x: Sharded, dim: Dims, keepdim: bool = False) -> Sharded:
    """`torch.logsumexp`."""
    dims = reduced_dims(x, dim)
    x = as_autocast_asks(x)
    along = Along(dims, x.mesh, x.layout.axes_of(dims))
    local: torch.Tensor = _LogSumExp.apply(x.local, along)
    return reduced(x, local, dims, keepdim)


def _along(x: Sharded, dim: int | None, dtype: DType) -> tuple[Along, Sharded]:
    if dim is None:
        raise UnsupportedError("`dim` (=None) must be given: the dim along which the values sum to 1, e.g. dim=1.")
    dims = reduced_dims(x, dim)
    x = as_autocast_asks(x) if dtype is None else x.like(x.local.to(dtype))
    return Along(dims, x.mesh, x.layout.axes_of(dims)), x


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: Along) -> torch.Tensor:
        powers = x.to(wide(x.dtype))
        powers = (powers - along.max(powers)).exp_()
        result = powers.div_(along.sum(powers)).to(x.dtype)
        ctx.along = along
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (result,) = ctx.saved_tensors
        scaled = grad.to(wide(grad.dtype)) * result
        return scaled.sub_(result * ctx.along.sum(scaled)).to(grad.dtype), None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: Along) -> torch.Tensor:
        shifted = x.to(wide(x.dtype))
        shifted = shifted - along.max(shifted)
        result = shifted.sub_(along.sum(shifted.exp()).log_()).to(x.dtype)
        ctx.along = along
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (result,) = ctx.saved_tensors
        wider = grad.to(wide(grad.dtype))
        return (wider - result.exp() * ctx.along.sum(wider)).to(grad.dtype), None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: Along) -> torch.Tensor:
        wider = x.to(wide(x.dtype))
        largest = along.max(wider)
        # Do not subtract infinity from a row of infinities: that would give NaN.
        largest = torch.where(largest.isinf(), 0, largest)
        result = along.sum((wider - largest).exp_()).log_() + largest
        ctx.save_for_backward(x, result)
        return result.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, result = ctx.saved_tensors
        return ((x - result).exp() * grad).to(x.dtype), None
