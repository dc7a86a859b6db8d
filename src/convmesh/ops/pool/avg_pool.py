"""Average and power-average pooling, 1D to 3D."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
import torch.nn.functional as F

from convmesh.errors import UnsupportedError
from convmesh.layout import Span
from convmesh.layout.maps import Window
from convmesh.ops.core.by_samples import by_samples
from convmesh.ops.core.device_constants import vector
from convmesh.ops.core.empty_result import empty_result
from convmesh.ops.core.per_dim import Ints
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.pool.pool_windows import Covered, Numbers, Pooling, cover, one_device_shape


def avg_pool(
    dims: int,
    input: Sharded,  # noqa: A002 - torch's name
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Sharded:
    """Average pooling; sums are divided by the sizes of the global windows, clipped as torch clips them."""
    pooling = Pooling.of(dims, kernel_size, stride, padding, ceil=ceil_mode)
    _check(input, pooling, divisor_override)
    covered = cover(input, pooling, 0.0)
    if not covered.out.size:
        local = empty_result(covered.local, covered.out.shape)
    elif not input.layout.axes_of(range(-dims, 0)):
        local = _torch_average(covered, pooling, count_include_pad, divisor_override)
    else:
        local = _torch_average(covered, pooling, True, divisor_override or math.prod(pooling.kernel))
        if not divisor_override:
            local = _correct(local, covered, pooling, input.shape, count_include_pad)
    return Sharded(local, covered.work, input.mesh)


def _check(x: Sharded, pooling: Pooling, divisor_override: int | None) -> None:
    if not x.is_floating_point():
        raise UnsupportedError(f"`input` (of {x.dtype}) must be floating point to be averaged over ranks.")
    average = getattr(F, f"avg_pool{pooling.dims}d")
    last = () if pooling.dims == 1 else (divisor_override,)
    one_device_shape(average, x.shape, pooling.kernel, pooling.stride, pooling.padding, pooling.ceil, True, *last)


def _torch_average(covered: Covered, pooling: Pooling, count_include_pad: bool, divisor: int | None) -> torch.Tensor:
    counting = pooling.ceil, count_include_pad, divisor
    if pooling.dims == 3:
        return F.avg_pool3d(covered.local, pooling.kernel, pooling.stride, covered.padding, *counting)
    if pooling.dims == 2:
        plane = _row_major(covered.local, covered.padding)
        return F.avg_pool2d(plane, pooling.kernel, pooling.stride, covered.padding, *counting)
    # Only the 2D function takes a divisor, so one spatial dim is pooled as a plane of height 1.
    (kernel,), (stride,), (padding,) = pooling.kernel, pooling.stride, covered.padding
    plane = _row_major(covered.local.unsqueeze(-2), covered.padding)
    return F.avg_pool2d(plane, (1, kernel), (1, stride), (0, padding), *counting).squeeze(-2)


def _row_major(plane: torch.Tensor, padding: Numbers) -> torch.Tensor:
    """Not channels-last if padded: CUDA's average pooling then computes wrong gradients (torch 2.11)."""
    if plane.is_cuda and any(padding) and plane.stride(-3) == 1:
        return plane.clone(memory_format=torch.contiguous_format)
    return plane


def _correct(
    averages: torch.Tensor, covered: Covered, pooling: Pooling, shape: torch.Size, count_include_pad: bool
) -> torch.Tensor:
    """Correct, for clipped windows, averages that were taken over the full kernel."""
    product = None
    for dim, window in enumerate(pooling.windows, start=-pooling.dims):
        ratios = _ratios(window, covered.out.spans[dim], shape[dim], count_include_pad)
        if ratios:
            factors = vector(ratios, averages.dtype, averages.device).view(-1, *[1] * (-1 - dim))
            product = factors if product is None else product * factors
    return averages if product is None else averages * product


@lru_cache(maxsize=4096)
def _ratios(window: Window, out: Span, extent: int, count_include_pad: bool) -> tuple[float, ...]:
    """The kernel's size over the size of each clipped window; empty if no window of `out` is clipped."""
    pad = window.low if count_include_pad else 0
    valid = Span(-pad, extent + pad)
    starts = range(out.start * window.stride - window.low, out.stop * window.stride - window.low, window.stride)
    sizes = [Span(start, start + window.kernel).intersect(valid).extent for start in starts]
    return tuple(window.kernel / size for size in sizes) if min(sizes) < window.kernel else ()


def lp_pool(
    dims: int,
    input: Sharded,  # noqa: A002 - torch's name
    norm_type: float,
    kernel_size: Ints,
    stride: Ints | None = None,
    ceil_mode: bool = False,
) -> Sharded:
    """Power-average pooling: torch's own formula, on shards."""
    if math.isinf(norm_type):
        raise UnsupportedError(
            f"`norm_type` (={norm_type}) must be finite, because torch versions differ on it; "
            f"use `F.max_pool{dims}d(x.abs(), ...)`."
        )
    average = avg_pool(dims, input.pow(norm_type), kernel_size, stride, ceil_mode=ceil_mode)
    size = math.prod(Pooling.of(dims, kernel_size, stride, 0).kernel)
    result: Sharded = (average.sign() * average.abs().relu()).mul(size).pow(1.0 / norm_type)
    return result


for _dims in (1, 2, 3):
    implements(getattr(F, f"avg_pool{_dims}d"))(partial(avg_pool, _dims))
    by_samples(getattr(F, f"avg_pool{_dims}d"))
    implements(getattr(F, f"lp_pool{_dims}d"))(partial(lp_pool, _dims))
