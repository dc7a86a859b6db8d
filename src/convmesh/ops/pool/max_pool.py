"""Max pooling, 1D to 3D."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.errors import UnsupportedError
from convmesh.kernels.fusing import is_fused
from convmesh.kernels.memory_format import memory_format_of
from convmesh.ops.core.by_samples import by_samples
from convmesh.ops.core.device_constants import vector
from convmesh.ops.core.empty_result import empty_result
from convmesh.ops.core.per_dim import Ints
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.pool.flat_index import ravel, rebase
from convmesh.ops.pool.fused_pool import fused_max, windows_here
from convmesh.ops.pool.pool_windows import Covered, Numbers, Pooling, cover, one_device_shape

_BACKWARD = {
    2: torch.ops.aten.max_pool2d_with_indices_backward,
    3: torch.ops.aten.max_pool3d_with_indices_backward,
}


def max_pool(
    dims: int,
    input: Sharded,  # noqa: A002 - torch's name
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Sharded | tuple[Sharded, Sharded]:
    """Max pooling; `return_indices` adds flat indices into the global spatial dims."""
    pooling = Pooling.of(dims, kernel_size, stride, padding, dilation, ceil_mode)
    _check(input.shape, pooling)
    covered = cover(input, pooling, _lowest(input.dtype))
    windows = windows_here(covered, pooling) if is_fused() and not return_indices else None
    if windows is not None:
        return Sharded(fused_max(covered.local, windows), covered.work, input.mesh)
    values, winners = _local_max(covered, pooling)
    result = Sharded(values, covered.work, input.mesh)
    if not return_indices:
        return result
    indices = rebase(winners, covered.extents, covered.starts, input.shape[-dims:])
    return result, Sharded(indices, covered.work, input.mesh)


def max_pool_with_indices(dims: int, *args: Any, **options: Any) -> Any:
    """The variant that always returns indices."""
    return max_pool(dims, *args, **{**options, "return_indices": True})


def _check(shape: torch.Size, pooling: Pooling) -> None:
    one_device_shape(
        getattr(F, f"max_pool{pooling.dims}d"),
        shape,
        pooling.kernel,
        pooling.stride,
        pooling.padding,
        pooling.dilation,
        pooling.ceil,
    )
    for window, extent in zip(pooling.windows, shape[-pooling.dims :], strict=True):
        starts = range(-window.low, 0, window.stride)[: window.out_extent(extent)]
        if any(start % window.dilation >= extent for start in starts):
            raise UnsupportedError(
                f"`dilation` (={window.dilation}) with padding {window.low} makes a window that covers no index of an "
                f"input of extent {extent}, so it has no maximum; use a smaller dilation or no padding."
            )


def _lowest(dtype: torch.dtype) -> float:
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _local_max(covered: Covered, pooling: Pooling) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima and their flat indices into the covered input."""
    if not covered.out.size:
        winners = torch.empty(covered.out.shape, dtype=torch.int64, device=covered.local.device)
        return empty_result(covered.local, covered.out.shape), winners
    first = _first_indices(covered, pooling) if covered.is_padded else None
    # One spatial dim is pooled as a plane of height 1.
    options = (
        _planar(pooling.kernel, 1),
        _planar(pooling.stride, 1),
        _planar(covered.padding, 0),
        _planar(pooling.dilation, 1),
    )
    local = covered.local.unsqueeze(-2) if pooling.dims == 1 else covered.local
    if first is None:
        values, winners = _torch_max(local, (*options, pooling.ceil))
    else:
        values, winners = _PaddedMax.apply(local, first, (*options, pooling.ceil))
    return (values.squeeze(-2), winners.squeeze(-2)) if pooling.dims == 1 else (values, winners)


def _planar(numbers: Numbers, neutral: int) -> Numbers:
    return (neutral, *numbers) if len(numbers) == 1 else numbers


def _torch_max(local: torch.Tensor, options: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    pool = F.max_pool2d if len(options[0]) == 2 else F.max_pool3d
    result: tuple[torch.Tensor, torch.Tensor] = pool(local, *options, return_indices=True)
    return result


def _first_indices(covered: Covered, pooling: Pooling) -> torch.Tensor:
    """For each window, the first index that is not padding, as a flat index into the covered input."""
    firsts = []
    for i, window in enumerate(pooling.windows, start=-pooling.dims):
        starts = [o * window.stride - window.low for o in range(*covered.out.spans[i])]
        first = tuple((start if start >= 0 else start % window.dilation) - covered.starts[i] for start in starts)
        firsts.append(vector(first, torch.int64, covered.local.device).view(-1, *[1] * (-1 - i)))
    return ravel(firsts, covered.extents)


class _PaddedMax(torch.autograd.Function):
    """Max pooling of a padded input. Padding never wins: a window of only -inf returns its `first` index."""

    @staticmethod
    def forward(
        ctx: Any, padded: torch.Tensor, first: torch.Tensor, options: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, winners = _torch_max(padded, options)
        winners = torch.where(values == _lowest(values.dtype), first, winners)
        ctx.options, ctx.shape, ctx.memory_format = options, padded.shape, memory_format_of(padded)
        ctx.save_for_backward(winners)
        ctx.mark_non_differentiable(winners)
        return values, winners

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # The adjoint takes the input, but reads only its shape and strides.
        like = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.memory_format)
        return _BACKWARD[len(ctx.options[0])](grad, like, *ctx.options, *ctx.saved_tensors), None, None


for _dims in (1, 2, 3):
    _name = f"max_pool{_dims}d"
    implements(getattr(F, _name), getattr(torch, _name))(partial(max_pool, _dims))
    by_samples(getattr(F, _name), getattr(torch, _name))
    implements(getattr(F, f"{_name}_with_indices"))(partial(max_pool_with_indices, _dims))
implements(torch.max_pool1d_with_indices)(partial(max_pool_with_indices, 1))
