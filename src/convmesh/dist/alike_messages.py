"""Messages of a dry exchange: of consecutive ones that are alike, only one is packed or put in place, for all of them.

A collective over hundreds of ranks has hundreds of messages of one shape. Without values they differ only in where
they start. Each is recorded all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from convmesh.dist.traffic import Traffic
from convmesh.dist.wire import add, put, take
from convmesh.layout import Region

Shape = tuple[int, ...]
Placed = tuple[Region, torch.Tensor]
"""Values, and their place in the tensor that they are written or added to."""


def pack_all(
    traffic: Traffic, regions: Sequence[Region], flat: Callable[[Region], torch.Tensor], held: Region | None
) -> list[torch.Tensor]:
    """`flat` of every region; `held` is the region of the piece that they are taken from, if there is just one."""
    packed: list[torch.Tensor] = []
    for shape, row in itertools.groupby(regions, lambda region: None if held is None else _shape_in(region, held)):
        alike = list(row)
        if shape is None:
            packed += [flat(region) for region in alike]
            continue
        first, is_copy = traffic.repeated(partial(flat, alike[0]), len(alike))
        others = partial(torch.empty, dtype=first.dtype, device=first.device)
        sizes = [first.numel()] * (len(alike) - 1)
        packed += [first, *(buffers(sizes, others) if is_copy else (first for _ in sizes))]
    return packed


def buffers(sizes: Sequence[int], empty: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Flat buffers that are freed together: one piece of memory, whose beginning stands for each of them."""
    if len(sizes) < 2:
        return [empty(size) for size in sizes]
    memory = empty(sum(sizes))
    beginnings = {size: memory.as_strided((size,), (1,)) for size in dict.fromkeys(sizes)}
    return [beginnings[size] for size in sizes]


def put_all(traffic: Traffic, out: torch.Tensor, arrived: Iterable[Placed]) -> None:
    """Write values into regions of `out`, except those that arrived in place."""
    _do_all(traffic, put, out, [one for one in arrived if _address(out, one[0]) != one[1].data_ptr()])


def add_all(traffic: Traffic, out: torch.Tensor, arrived: Iterable[Placed]) -> None:
    """Add values to regions of `out`."""
    _do_all(traffic, add, out, arrived)


def _do_all(traffic: Traffic, act: Callable[..., None], out: torch.Tensor, arrived: Iterable[Placed]) -> None:
    for (shape, _), row in itertools.groupby(arrived, lambda one: (_box_shape(one[0]), one[1].stride())):
        alike = list(row)
        if shape is None:
            for place, values in alike:
                act(out, place, values)
        else:
            traffic.repeated(partial(act, out, *alike[0]), len(alike))


def _shape_in(region: Region, held: Region) -> Shape | None:
    """The shape of a box inside another; None if either is not a box, or the first is not inside."""
    shape = _box_shape(region)
    if shape is None or not held.is_box:
        return None
    pairs = zip(region.dims, held.dims, strict=True)
    is_inside = all(outer[0].start <= inner[0].start and inner[0].stop <= outer[0].stop for inner, outer in pairs)
    return shape if is_inside else None


def _box_shape(region: Region) -> Shape | None:
    return region.shape if region.is_box else None


def _address(out: torch.Tensor, place: Region) -> int:
    """Where a region of a tensor without values starts; such memory starts at 0."""
    if not place.is_box:
        return take(out, place).data_ptr()
    offset = sum([spans[0].start * step for spans, step in zip(place.dims, out.stride(), strict=True)])
    return int((out.storage_offset() + offset) * out.element_size())
