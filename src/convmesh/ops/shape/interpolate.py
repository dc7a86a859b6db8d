"""Split interpolation: nearest, linear and cubic, in every number of dims that torch supports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from convmesh.errors import UnsupportedError
from convmesh.layout import Box, Span
from convmesh.layout.maps import DimMap, Same
from convmesh.layout.resize import Alone, Arithmetic, Method, Resized, step_of
from convmesh.ops.core.by_samples import by_samples
from convmesh.ops.core.device_constants import lasting
from convmesh.ops.core.empty_result import empty_result
from convmesh.ops.core.exchange_plans import output_layout
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.probe import probe
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.shape.resize_rounding import linear_arithmetic

METHODS: dict[str, tuple[Method, tuple[int, ...]]] = {
    "nearest": ("nearest", (1, 2, 3)),
    "nearest-exact": ("nearest-exact", (1, 2, 3)),
    "linear": ("linear", (1,)),
    "bilinear": ("linear", (2,)),
    "trilinear": ("linear", (3,)),
    "bicubic": ("cubic", (2,)),
}
"""torch's modes: what they do in each dim, and for how many spatial dims they exist."""

MOST_VECTORISED = 128
"""Up to this height + width of the output, torch's CPU kernel for 2D nearest rounds in float32 for every type."""


by_samples(F.interpolate)


@implements(F.interpolate)
def interpolate(
    input: Sharded,  # noqa: A002 - torch's name
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Sharded:
    """`F.interpolate` of a sharded input; local if no spatial dim is cut."""
    x = input
    if not x.layout.axes_of(range(2, x.dim())):
        return _uncut(x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    _check(x, mode, antialias)
    # All modes give the same output size, so nearest is used.
    refuses_align = align_corners if mode in ("nearest", "nearest-exact", "area") else None
    outs = F.interpolate(probe(x), size, scale_factor, "nearest", refuses_align, recompute_scale_factor).shape[2:]
    if mode == "area":
        pool: Any = getattr(F, f"adaptive_avg_pool{len(outs)}d")
        return pool(x, tuple(outs))  # type: ignore[no-any-return]
    uses_scale = scale_factor is not None and not recompute_scale_factor
    scales = _per_dim(scale_factor, len(outs)) if uses_scale else (None,) * len(outs)
    return _resize(x, _resizes(x, mode, tuple(outs), scales, bool(align_corners)), mode, align_corners)


def _uncut(x: Sharded, *args: Any) -> Sharded:
    """Torch's own operator, where all of space is here."""
    whole = F.interpolate(probe(x), *args).shape
    work = x.layout.with_shape(whole)
    if not x.local.numel():  # torch's meta kernels fail on empty tensors
        return Sharded(empty_result(x.local, work.box(x.mesh.rank).shape), work, x.mesh)
    return Sharded(F.interpolate(x.local, *args), work, x.mesh)


def _check(x: Sharded, mode: str, antialias: bool) -> None:
    dims = x.dim() - 2
    if antialias:
        raise UnsupportedError(
            "`antialias` (=True) has no split version if spatial dims are cut; use antialias=False, or cut only the "
            "samples."
        )
    if mode != "area" and (mode not in METHODS or dims not in METHODS[mode][1]):
        modes = ", ".join(name for name, (_, has) in METHODS.items() if dims in has)
        raise UnsupportedError(f"`mode` (={mode!r}) must be one of {modes}, area for {dims} spatial dims.")
    if mode != "area" and METHODS[mode][0] in ("linear", "cubic") and not x.is_floating_point():
        raise UnsupportedError(f"`mode` (={mode!r}) of {x.dtype} has no split version; use `x.float()`, or nearest.")


def _per_dim(scale_factor: Any, dims: int) -> tuple[float, ...]:
    return tuple(scale_factor) if isinstance(scale_factor, (tuple, list)) else (scale_factor,) * dims


def _resizes(
    x: Sharded, mode: str, outs: tuple[int, ...], scales: Sequence[float | None], align_corners: bool
) -> tuple[DimMap, ...]:
    """A map for each dim, with the step that torch's kernel uses for this type, device and size."""
    method = METHODS[mode][0]
    arithmetic = _arithmetic(x, method, outs)
    maps: list[DimMap] = [Same(), Same()]
    for extent, out, scale in zip(x.shape[2:], outs, scales, strict=True):
        used = None if _drops_scale(x, method, arithmetic, outs, extent, out) else scale
        step = step_of(extent, out, used, align_corners, arithmetic)
        maps.append(Same() if step == 1 and out == extent else Resized(method, out, step, align_corners, arithmetic))
    return tuple(maps)


def _arithmetic(x: Sharded, method: Method, outs: tuple[int, ...]) -> Arithmetic:
    """How the kernel for this type, device and size rounds positions.

    On CPUs, that of the kernel for contiguous tensors: ranks with empty shards cannot know the memory format, and all
    must agree. Channels-last kernels break ties differently in float64, and for scales that round to 1 or 2.
    """
    is_vectorised = len(outs) == 2 and sum(outs) <= MOST_VECTORISED
    if method in ("nearest", "nearest-exact") and (x.is_cuda or is_vectorised):
        return "single"
    if x.dtype == torch.float64:
        return "double"
    return linear_arithmetic() if method == "linear" and not (x.is_cuda or is_vectorised) else "fused"


def _drops_scale(
    x: Sharded, method: Method, arithmetic: Arithmetic, outs: tuple[int, ...], extent: int, out: int
) -> bool:
    """Whether torch's kernel takes a shortcut that ignores the scale factor and uses only the extents."""
    if x.is_cuda:
        return tuple(x.shape[2:]) == outs and (method in ("linear", "cubic") or len(outs) == 2)
    if method == "nearest":
        return arithmetic == "single" and out in (extent, 2 * extent)
    return method == "linear" and out == extent


def _resize(x: Sharded, maps: tuple[DimMap, ...], mode: str, align_corners: bool | None) -> Sharded:
    work = output_layout(x.layout, maps)
    local = fetch(x, work, maps)
    dims = _dims(maps, work.box(x.mesh.rank), tuple(x.shape))
    plain = [dim.alone for dim in dims]
    if local.numel() and all(plain):
        return Sharded(_interpolate(local, plain, mode, align_corners), work, x.mesh)  # type: ignore[arg-type]
    return Sharded(_gather(local, dims), work, x.mesh)


class _DimWork(NamedTuple):
    """One spatial dim of the local work; `held` are the fetched indices of the input."""

    dim: int
    resized: Resized | None
    out: Span
    held: Span
    extent: int
    alone: Alone | None


@lru_cache(maxsize=1024)
def _dims(maps: tuple[DimMap, ...], out: Box, shape: tuple[int, ...]) -> tuple[_DimWork, ...]:
    return tuple(_dim(d, maps[d], out.spans[d], shape[d]) for d in range(2, len(maps)))


def _dim(dim: int, dim_map: DimMap, out: Span, extent: int) -> _DimWork:
    if not out.extent:
        return _DimWork(dim, None, out, out, extent, None)
    (held,) = dim_map.needs(out, extent)
    if isinstance(dim_map, Resized):
        return _DimWork(dim, dim_map, out, held, extent, dim_map.alone(out, held, extent))
    return _DimWork(dim, None, out, held, extent, Alone(held.extent, Span(0, held.extent)))


def _interpolate(local: torch.Tensor, dims: list[Alone], mode: str, align_corners: bool | None) -> torch.Tensor:
    """torch's own kernel on the fetched input; with halos it computes slightly more than the box, which is cropped."""
    y = F.interpolate(local, size=[dim.extent for dim in dims], mode=mode, align_corners=align_corners)
    for index, (_, kept) in enumerate(dims, start=2):
        y = y.narrow(index, kept.start, kept.extent)
    return y


def _gather(local: torch.Tensor, dims: Sequence[_DimWork]) -> torch.Tensor:
    """Resize dim by dim, shrinking ones first; 16-bit numbers are summed in 32 bits, as torch does."""
    resized = [dim for dim in dims if dim.resized is not None]
    weighted = any(dim.resized is not None and dim.resized.method in ("linear", "cubic") for dim in resized)
    y = local.float() if weighted and local.dtype in (torch.float16, torch.bfloat16) else local
    for dim in sorted(resized, key=lambda d: d.out.extent / d.held.extent):
        y = _blend(y, dim)
    return y.to(local.dtype)


def _blend(y: torch.Tensor, work: _DimWork) -> torch.Tensor:
    total = None
    for indices, weights in _taps(work, y.dim(), y.dtype, y.device):
        tap = y.index_select(work.dim, indices)
        tap = tap if weights is None else tap * weights
        total = tap if total is None else total + tap
    assert total is not None
    return total


@lru_cache(maxsize=1024)
def _taps(
    work: _DimWork, dims: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor | None], ...]:
    """Local indices and broadcastable weights of every tap, kept on the device."""
    assert work.resized is not None
    indices, weights = work.resized.taps(work.out, work.extent)
    with lasting():
        local = torch.from_numpy(indices - work.held.start).to(device)
        if weights is None:
            return ((local[0], None),)
        shape = [-1 if d == work.dim else 1 for d in range(dims)]
        factors = torch.from_numpy(weights).to(device, dtype)
        return tuple((row, factor.view(shape)) for row, factor in zip(local, factors, strict=True))
