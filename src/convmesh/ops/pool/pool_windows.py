"""The windows of pooling operators, and the input that one rank's windows cover.

Uncut dims keep torch's own padding; in cut dims the ranks at the borders add the padding themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from convmesh.layout import Box, Layout
from convmesh.layout.maps import DimMap, Same, Whole, Window
from convmesh.ops.core.exchange_plans import output_layout
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.padding import extend
from convmesh.ops.core.per_dim import Ints, spread
from convmesh.ops.core.probe import probe_of
from convmesh.ops.core.sharded import Sharded

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pooling:
    """A pooling operator's options, one number per spatial dim."""

    kernel: Numbers
    stride: Numbers
    padding: Numbers
    dilation: Numbers
    ceil: bool

    @classmethod
    def of(
        cls, dims: int, kernel: Ints, stride: Ints | None, padding: Ints, dilation: Ints = 1, ceil: bool = False
    ) -> Pooling:
        """Options as torch takes them; without a stride, windows are adjacent."""
        kernels = spread("kernel_size", kernel, dims)
        no_stride = stride is None or (isinstance(stride, Sequence) and not stride)
        strides = kernels if no_stride or stride is None else spread("stride", stride, dims)
        return cls(kernels, strides, spread("padding", padding, dims, 0), spread("dilation", dilation, dims), ceil)

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def windows(self) -> tuple[Window, ...]:
        each = zip(self.kernel, self.stride, self.dilation, self.padding, strict=True)
        return tuple(Window(k, s, d, p, p, ceil=self.ceil) for k, s, d, p in each)


@dataclass(frozen=True, slots=True)
class Covered:
    """The input that this rank's windows cover, and where it starts."""

    local: torch.Tensor
    starts: Numbers
    padding: Numbers
    """Padding left to torch: that of the uncut dims."""
    is_padded: bool
    work: Layout
    out: Box
    """This rank's box of the output."""

    @property
    def extents(self) -> Numbers:
        return tuple(self.local.shape[-len(self.starts) :])


@lru_cache(maxsize=4096)
def one_device_shape(function: Callable[..., torch.Tensor], shape: torch.Size, *options: Any) -> torch.Size:
    """The shape of the output on one device; options that torch refuses raise its own error on every rank."""
    return function(probe_of(shape), *options).shape


def cover(x: Sharded, pooling: Pooling, fill: float) -> Covered:
    """Fetch the input that this rank's windows cover; `fill` pads beyond the borders of cut dims."""
    lead = x.dim() - pooling.dims
    cut = [x.layout.is_cut(dim) for dim in range(lead, x.dim())]
    work, local = _fetch(x, pooling, cut)
    out = work.box(x.mesh.rank)
    starts = [0] * pooling.dims
    fetched = local
    for i, window in enumerate(pooling.windows if out.size else ()):
        if cut[i]:
            extended = window.extended(out.spans[lead + i])
            local = extend(local, lead + i, extended, x.shape[lead + i], value=fill)
            starts[i] = extended.start
    padding = tuple(0 if is_cut else p for is_cut, p in zip(cut, pooling.padding, strict=True))
    return Covered(local, tuple(starts), padding, local is not fetched, work, out)


def _fetch(x: Sharded, pooling: Pooling, cut: Sequence[bool]) -> tuple[Layout, torch.Tensor]:
    spatial = x.shape[x.dim() - pooling.dims :]
    # As wide as the window reaches: indices between the taps of a dilated window are fetched too.
    windows: list[DimMap] = [
        replace(window, kernel=window.reach, dilation=1) if is_cut else Whole(window.out_extent(n))
        for window, is_cut, n in zip(pooling.windows, cut, spatial, strict=True)
    ]
    maps = (*[Same()] * (x.dim() - pooling.dims), *windows)
    work = output_layout(x.layout, maps)
    return work, fetch(x, work, maps)
