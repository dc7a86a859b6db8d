"""Adaptive average and max pooling, 1D to 3D.

A cut dim that is pooled to one index (global pooling) is not gathered: each rank pools its own indices, then the ranks
combine their results, and every rank has the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.dist import OpenMesh, sum_over
from convmesh.errors import UnsupportedError
from convmesh.layout import Box, Layout, Span
from convmesh.layout.adaptive import Adaptive, unrolled
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.layout.maps import DimMap, Same
from convmesh.ops.core.by_samples import by_samples
from convmesh.ops.core.device_constants import vector
from convmesh.ops.core.empty_result import empty_result
from convmesh.ops.core.exchange_plans import Maps, output_layout
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.padding import pad_dim
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.pool.election import NOBODY, elect
from convmesh.ops.pool.flat_index import ravel, unravel
from convmesh.ops.pool.pool_windows import one_device_shape

OutputSize = int | Sequence[int | None]


@dataclass(frozen=True, slots=True)
class _Split:
    """How an adaptive pooling is split, for one rank."""

    maps: Maps
    work: Layout
    """The output's layout, except that cut dims pooled to one index are still as in the input."""
    result: Layout
    combined: tuple[int, ...]
    """The cut dims that are pooled to one index."""
    irregular: dict[int, list[Span]]
    """Windows of those cut dims in which torch, given only a part, would choose different ones."""
    out: Box

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks combine their results."""
        return self.work.axes_of(self.combined)


def _split(x: Sharded, name: str, dims: int, output_size: OutputSize) -> _Split:
    if not x.is_floating_point():
        raise UnsupportedError(f"`input` (of {x.dtype}) must be floating point for `{name}`.")
    size = output_size if isinstance(output_size, int) else tuple(output_size)
    shape = one_device_shape(getattr(F, name), x.shape, size)
    return _split_layout(x.layout, shape, dims, x.mesh.rank)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _split_layout(source: Layout, shape: torch.Size, dims: int, rank: int) -> _Split:
    spatial = range(len(shape) - dims, len(shape))
    combined = tuple(d for d in spatial if shape[d] == 1 and source.is_cut(d))
    maps: Maps = tuple(_dim_map(d in spatial and d not in combined, n) for d, n in enumerate(shape))
    work = output_layout(source, maps)
    result = work.with_shape(shape).with_whole(combined)
    out = result.box(rank)
    irregular = {
        dim: m.windows(out.spans[dim], source.shape[dim])
        for dim, m in enumerate(maps)
        if isinstance(m, Adaptive) and source.is_cut(dim) and not m.is_regular(source.shape[dim])
    }
    return _Split(maps, work, result, combined, irregular, out)


def _dim_map(is_pooled: bool, out: int) -> DimMap:
    return Adaptive(out) if is_pooled else Same()


def adaptive_avg_pool(
    dims: int,
    input: Sharded,  # noqa: A002 - torch's name
    output_size: OutputSize,
) -> Sharded:
    """Adaptive average pooling; a cut dim pooled to one index takes a sum of the ranks' shares."""
    name = f"adaptive_avg_pool{dims}d"
    split = _split(input, name, dims, output_size)
    local = fetch(input, split.work, split.maps)
    if local.numel():
        for dim, windows in split.irregular.items():
            local = _unroll_with_zeros(local, dim, windows)
        average = getattr(F, name)(local, split.out.shape[-dims:])
        average = average * _share(local, input, split) if split.combined else average
        for dim, windows in split.irregular.items():
            average = _correct(average, dim, windows)
    else:
        average = empty_result(local, split.out.shape)
    return Sharded(_sum(average, input.mesh, split.axes), split.result, input.mesh)


def _share(local: torch.Tensor, x: Sharded, split: _Split) -> float:
    return math.prod(local.shape[dim] / x.shape[dim] for dim in split.combined)


def _unroll_with_zeros(local: torch.Tensor, dim: int, windows: list[Span]) -> torch.Tensor:
    """Windows back to back, padded with zeros to one length."""
    start, zero = windows[0].start, local.shape[dim]
    rows = tuple(zero if i is None else i - start for i in unrolled(windows))
    return pad_dim(local, dim, 0, 1).index_select(dim, vector(rows, torch.int64, local.device))


def _correct(average: torch.Tensor, dim: int, windows: list[Span]) -> torch.Tensor:
    """Turn averages over the longest window's length into averages over each window's own."""
    longest = max(window.extent for window in windows)
    ratios = tuple(longest / window.extent for window in windows)
    return average * vector(ratios, average.dtype, average.device).view(-1, *[1] * (average.dim() - 1 - dim))


def _sum(share: torch.Tensor, mesh: OpenMesh, axes: tuple[str, ...]) -> torch.Tensor:
    """The sum over ranks, in at least float32."""
    if not axes:
        return share
    wide = share.float() if share.dtype in (torch.float16, torch.bfloat16) else share
    return sum_over(wide, mesh, axes).to(share.dtype)


def adaptive_max_pool(
    dims: int,
    input: Sharded,  # noqa: A002 - torch's name
    output_size: OutputSize,
    return_indices: bool = False,
) -> Sharded | tuple[Sharded, Sharded]:
    """Adaptive max pooling; `return_indices` adds flat indices into the global spatial dims."""
    name = f"adaptive_max_pool{dims}d"
    split = _split(input, name, dims, output_size)
    local = fetch(input, split.work, split.maps)
    if local.numel():
        for dim, windows in split.irregular.items():
            local = local.index_select(dim, _rows(windows, local.device) - windows[0].start)
        values, winners = getattr(F, name)(local, split.out.shape[-dims:], return_indices=True)
        winners = _global_indices(winners, local.shape[-dims:], input, split)
    else:
        values = empty_result(local, split.out.shape) - torch.inf
        winners = torch.full(split.out.shape, NOBODY, device=local.device)
    values, winners = elect(values, winners, input.mesh, split.axes)
    result = Sharded(values, split.result, input.mesh)
    return (result, Sharded(winners, split.result, input.mesh)) if return_indices else result


def adaptive_max_pool_with_indices(dims: int, *args: Any, **options: Any) -> Any:
    """The variant that always returns indices."""
    return adaptive_max_pool(dims, *args, **{**options, "return_indices": True})


def _rows(windows: list[Span], device: torch.device) -> torch.Tensor:
    """Windows back to back, all of one length: shorter ones repeat their last index, which keeps the maximum."""
    rows: list[int] = []
    for i in unrolled(windows):
        rows.append(rows[-1] if i is None else i)
    return vector(tuple(rows), torch.int64, device)


def _global_indices(flat: torch.Tensor, held: torch.Size, x: Sharded, split: _Split) -> torch.Tensor:
    """Convert indices into the local input to indices into the global one."""
    dims = len(held)
    spans = split.work.box(x.mesh.rank).spans
    coordinates = []
    for dim, coordinate in enumerate(unravel(flat, held), start=x.dim() - dims):
        if dim in split.irregular:
            coordinates.append(_rows(split.irregular[dim], flat.device)[coordinate])
        else:
            coordinates.append(coordinate + split.maps[dim].needs(spans[dim], x.shape[dim])[0].start)
    return ravel(coordinates, x.shape[-dims:])


for _dims in (1, 2, 3):
    _name = f"adaptive_max_pool{_dims}d"
    implements(getattr(F, f"adaptive_avg_pool{_dims}d"))(partial(adaptive_avg_pool, _dims))
    implements(getattr(F, _name))(partial(adaptive_max_pool, _dims))
    by_samples(getattr(F, f"adaptive_avg_pool{_dims}d"), getattr(F, _name))
    implements(getattr(F, f"{_name}_with_indices"))(partial(adaptive_max_pool_with_indices, _dims))
implements(torch.adaptive_max_pool1d)(partial(adaptive_max_pool_with_indices, 1))
