"""Split pixel and channel shuffles."""

from __future__ import annotations

from collections.abc import Callable

import torch

from convmesh.errors import UnsupportedError
from convmesh.layout.maps import DimMap, Same, Whole, Window
from convmesh.layout.resize import Repeated
from convmesh.ops.core.empty_result import empty_result
from convmesh.ops.core.exchange_plans import Maps, output_layout
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded


@implements(torch.pixel_shuffle)
def pixel_shuffle(input: Sharded, upscale_factor: int) -> Sharded:  # noqa: A002 - torch's name
    """Channels to space: (…, C·r², H, W) → (…, C, H·r, W·r)."""
    area = upscale_factor**2
    _check(input, "upscale_factor", upscale_factor, {-3: area})
    maps = _lead(input, Window(area, stride=area), Repeated(upscale_factor), Repeated(upscale_factor))
    return _shuffle(input, maps, upscale_factor, torch.pixel_shuffle)


@implements(torch.pixel_unshuffle)
def pixel_unshuffle(input: Sharded, downscale_factor: int) -> Sharded:  # noqa: A002
    """Space to channels: (…, C, H·r, W·r) → (…, C·r², H, W)."""
    _check(input, "downscale_factor", downscale_factor, {-2: downscale_factor, -1: downscale_factor})
    window = Window(downscale_factor, stride=downscale_factor)
    maps = _lead(input, Repeated(downscale_factor**2), window, window)
    return _shuffle(input, maps, downscale_factor, torch.pixel_unshuffle)


@implements(torch.channel_shuffle)
def channel_shuffle(input: Sharded, groups: int) -> Sharded:  # noqa: A002
    """Interleave the channels of `groups` groups; ranks that hold only some of the channels fetch the others."""
    _check(input, "groups", groups, {1: groups})
    maps: Maps = (Same(), Whole(input.shape[1]), *[Same()] * (input.dim() - 2))
    work = output_layout(input.layout, maps)
    channels = work.box(input.mesh.rank).spans[1]
    y = torch.channel_shuffle(fetch(input, work, maps), groups)
    return Sharded(y.narrow(1, channels.start, channels.extent), work, input.mesh)


def _check(x: Sharded, name: str, value: int, divisors: dict[int, int]) -> None:
    if x.dim() < 3 or value < 1 or any(x.shape[dim] % divisor for dim, divisor in divisors.items()):
        rules = " and ".join(f"dim {dim} must be divisible by {divisor}" for dim, divisor in divisors.items())
        raise UnsupportedError(
            f"`{name}` (={value}) must be positive, and {rules}, but the tensor's shape is {tuple(x.shape)}."
        )


def _lead(x: Sharded, *last: DimMap) -> Maps:
    return (*[Same()] * (x.dim() - len(last)), *last)


def _shuffle(x: Sharded, maps: Maps, factor: int, function: Callable[[torch.Tensor, int], torch.Tensor]) -> Sharded:
    """Shuffle everything fetched, then keep the box: a cut may run through the middle of an input pixel."""
    work = output_layout(x.layout, maps)
    local = fetch(x, work, maps)
    out = work.box(x.mesh.rank)
    if not out.size:
        return Sharded(empty_result(local, out.shape), work, x.mesh)
    y = function(local, factor)
    for dim, (dim_map, span) in enumerate(zip(maps, out.spans, strict=True)):
        if isinstance(dim_map, Repeated):
            y = y.narrow(dim, span.start % dim_map.factor, span.extent)
    return Sharded(y, work, x.mesh)
