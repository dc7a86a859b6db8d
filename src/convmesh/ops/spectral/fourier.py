"""Split Fourier transforms: dim by dim, each on ranks that hold all of it.

Before a cut dim is transformed, one exchange (a pencil transpose) moves its axes to another dim of the transform,
preferably one that is done. They stay there, so an inverse transform of the result begins with whole dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fft

from convmesh.layout import Layout
from convmesh.layout.layout import LAYOUTS_KEPT, fair_cut
from convmesh.ops.core.empty_result import empty_result
from convmesh.ops.core.probe import probe, probe_of
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.shape.along import local_result

Function = Callable[..., Any]


class LineTransform(NamedTuple):
    """A transform along one dim, padded or cropped to `extent` values first; None keeps all of the input's."""

    function: Function
    dim: int
    extent: int | None


def transformed(x: Sharded, stages: Sequence[LineTransform], norm: str | None) -> Sharded:
    """The stages one after another."""
    done: tuple[int, ...] = ()
    dims = tuple(stage.dim for stage in stages)
    for stage in stages:
        x = x.redistribute(with_dim_whole(x.layout, stage.dim, (*reversed(done), *dims)))
        x = local_result(x, _local, (stage, norm))
        done = (*done, stage.dim)
    return x


def _local(x: torch.Tensor, stage: LineTransform, norm: str | None) -> torch.Tensor:
    options: dict[str, Any] = {"n": stage.extent, "dim": stage.dim, "norm": norm}
    if x.numel():
        result: torch.Tensor = stage.function(x, **options)
        return result
    like = stage.function(probe_of([max(extent, 1) for extent in x.shape], x.dtype), **options)
    shape = [extent if dim == stage.dim or x.shape[dim] else 0 for dim, extent in enumerate(like.shape)]
    return empty_result(x.real if not like.is_complex() and x.is_complex() else x, shape).to(like.dtype)


@lru_cache(maxsize=LAYOUTS_KEPT)
def with_dim_whole(layout: Layout, dim: int, preferred: tuple[int, ...]) -> Layout:
    """The layout with the axes of `dim` moved to a dim that has none: the first of `preferred`, else the longest."""
    axes = layout.cuts[dim].axes
    if not axes:
        return layout
    parts = layout.mesh.extent(axes)
    others = sorted(range(len(layout.shape)), key=lambda other: -layout.shape[other])
    fitting = (d for d in (*preferred, *others) if d != dim and not layout.is_cut(d) and layout.shape[d] >= parts)
    whole, target = layout.with_whole([dim]), next(fitting, None)
    return whole if target is None else whole.replacing({target: fair_cut(layout.mesh, layout.shape[target], axes)})


def _register_along_one(function: Function) -> None:
    @implements(function)
    def split(input: Sharded, n: int | None = None, dim: int = -1, norm: str | None = None) -> Sharded:  # noqa: A002
        function(probe(input), n, dim, norm)
        return transformed(input, [LineTransform(function, dim % input.dim(), n)], norm)


Dims = int | Sequence[int] | None


def _register_along_several(function: Function, each: Function, half: Function | None, first: Dims) -> None:
    """`half` is the transform between real and complex numbers along the last dim of the list."""

    @implements(function)
    def split(input: Sharded, s: Dims = None, dim: Dims = first, norm: str | None = None) -> Sharded:  # noqa: A002
        probed, places = _probed(input, dim)
        function(probed, s, places, norm)
        named = _named(input, s, dim)
        plain = [LineTransform(each, d, extent) for d, extent in (named if half is None else named[:-1])]
        plain.sort(key=lambda stage: input.layout.is_cut(stage.dim))  # what is whole needs no exchange
        last = [] if half is None else [LineTransform(half, *named[-1])]
        return transformed(input, [*last, *plain] if half is fft.rfft else [*plain, *last], norm)


def _probed(x: Sharded, dim: Dims) -> tuple[torch.Tensor, Dims]:
    """A probe whose last dims are the transform's, in order: without data, torch 2.11 fails on some other orders.

    Arguments that torch refuses are left for it to refuse.
    """
    count, dims = x.dim(), [] if dim is None or isinstance(dim, int) else [d % max(1, x.dim()) for d in dim]
    is_refused = len({*dims}) < len(dims) or (isinstance(dim, Sequence) and any(not -count <= d < count for d in dim))
    if not dims or is_refused:
        return probe(x), dim
    order = [*(d for d in range(count) if d not in dims), *dims]
    return probe_of([x.shape[d] for d in order], x.dtype), [*range(count - len(dims), count)]


def _named(x: Sharded, s: Dims, dim: Dims) -> list[tuple[int, int | None]]:
    """The dims of a transform, and the extent that each is padded or cropped to, as torch reads them."""
    extents = [s] if isinstance(s, int) else s
    if dim is None:
        dims = [*range(x.dim())] if extents is None else [*range(x.dim() - len(extents), x.dim())]
    else:
        dims = [dim] if isinstance(dim, int) else [*dim]
    wanted = [None if extents is None or extents[i] == -1 else int(extents[i]) for i in range(len(dims))]
    return [(d % x.dim(), extent) for d, extent in zip(dims, wanted, strict=True)]


for _function in (fft.fft, fft.ifft, fft.rfft, fft.irfft, fft.hfft, fft.ihfft):
    _register_along_one(_function)
for _functions, _last_two in (
    ((fft.fftn, fft.ifftn, fft.rfftn, fft.irfftn), None),
    ((fft.fft2, fft.ifft2, fft.rfft2, fft.irfft2), (-2, -1)),
):
    for _function, _each, _half in zip(
        _functions, (fft.fft, fft.ifft, fft.fft, fft.ifft), (None, None, fft.rfft, fft.irfft), strict=True
    ):
        _register_along_several(_function, _each, _half, _last_two)


def _register_shift(function: Function, sign: int) -> None:
    @implements(function)
    def split(input: Sharded, dim: Dims = None) -> Any:  # noqa: A002
        """Move half of each dim from one end to the other."""
        dims = [*range(input.dim())] if dim is None else [dim] if isinstance(dim, int) else [*dim]
        halves = [input.shape[d] // 2 if sign > 0 else -(input.shape[d] // 2) for d in dims]
        rolled: Any = torch.roll
        return rolled(input, halves, dims)


_register_shift(fft.fftshift, 1)
_register_shift(fft.ifftshift, -1)
