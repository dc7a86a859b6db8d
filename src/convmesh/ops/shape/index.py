"""Split slices, `narrow`, `select`, `flip` and `roll`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Any, cast

import torch

from convmesh.errors import ConvMeshError, UnsupportedError
from convmesh.layout import Cut, Layout, Partition
from convmesh.layout.maps import DimMap, Padded, Same, Strided
from convmesh.ops.core.broadcast import line_up
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, replicated
from convmesh.ops.shape.along import index_select
from convmesh.ops.shape.pad import fold_borders

_T = torch.Tensor

WHOLE_ONE = Cut((), Partition.even(1, 1))
"""A dim of extent 1 that every rank holds."""


class OutOfRangeError(ConvMeshError, IndexError):
    """An index out of range; an IndexError, so that iteration over a tensor ends."""


@implements(operator.getitem, _T.__getitem__)
def getitem(x: Sharded, index: Any) -> Sharded:
    """Slices with positive steps, integers, `None` and `...`, and one list or tensor of whole numbers.

    A dim removed by an integer frees its axes.
    """
    if (listed := _listed_pick(index)) is not None:
        return _picked(x, *listed)
    picks = _expand(index, x.dim())
    maps = _maps([pick for pick in picks if pick is not None], x.shape)
    if all(isinstance(m, Same) for m in maps) and len(picks) == x.dim():
        return x
    work = _work(x.layout, maps, [isinstance(pick, Integral) for pick in picks if pick is not None])
    local = fetch(x, work, maps)
    within = [_within(pick) for pick in picks]
    return Sharded(local[tuple(within)], _arranged(work, picks), x.mesh)


def _listed_pick(index: Any) -> tuple[list[Any], int] | None:
    """All picks and the place of the one that lists numbers, if there is exactly one and no pick is a single number."""
    picks = list(index) if isinstance(index, tuple) else [index]
    places = [place for place, pick in enumerate(picks) if _lists_numbers(pick)]
    return (picks, places[0]) if len(places) == 1 and not any(map(_is_whole, picks)) else None


def _lists_numbers(pick: Any) -> bool:
    if isinstance(pick, list):
        return bool(pick) and all(map(_is_whole, pick))
    is_number = isinstance(pick, (torch.Tensor, Sharded)) and not pick.is_floating_point()
    return is_number and pick.dtype != torch.bool and pick.dim() > 0


def _picked(x: Sharded, picks: list[Any], place: int) -> Sharded:
    """Slice everything else first, then pick the listed numbers of one dim, in the shape of their list."""
    rest: Any = getitem(x, tuple(slice(None) if at == place else pick for at, pick in enumerate(picks)))
    behind = len(picks) - place - 1 if Ellipsis in picks[:place] else None
    dim = place if behind is None else rest.dim() - 1 - behind
    listed = torch.tensor(picks[place], device=x.device) if isinstance(picks[place], list) else picks[place]
    numbers = torch.where(listed < 0, listed + rest.shape[dim], listed)
    chosen: Any = index_select(rest, dim, numbers.reshape(-1))
    shaped: Sharded = chosen if numbers.dim() == 1 else chosen.unflatten(dim, tuple(numbers.shape))
    return shaped


@implements(operator.setitem, _T.__setitem__)
def setitem(x: Any, index: Any, value: Any) -> None:
    """`x[index] = value`, in the layout of `x`; dims of which only a part is set are gathered for it.

    A mask takes one value.
    """
    if not isinstance(x, Sharded):  # a plain tensor takes all of a sharded one, on every rank
        x[index] = value.gather()
        return
    if _is_mask(index):
        _set_where(x, index, value)
        return
    picks = _expand(index, x.dim())
    kept = [pick for pick in picks if pick is not None]
    parts = [d for d, m in enumerate(_maps(kept, x.shape)) if not isinstance(m, Same) or _is_whole(kept[d])]
    whole = x.with_whole(parts)
    local = whole.local.clone()
    local[index] = _as_set(getitem(whole.detach(), index), value)
    x.local = whole.like(local).redistribute(x.layout).local


def _is_mask(index: Any) -> bool:
    return isinstance(index, (torch.Tensor, Sharded)) and index.dtype == torch.bool


def _set_where(x: Sharded, mask: Any, value: Any) -> None:
    """`x[mask] = value` for one value, or none; several would be counted off along the mask."""
    is_one = not isinstance(value, (torch.Tensor, Sharded)) or not value.shape
    if not is_one or [*mask.shape] != [*x.shape[: mask.dim()]]:
        raise UnsupportedError(
            f"setting a mask of shape {tuple(mask.shape)} in a tensor of shape {tuple(x.shape)}: the split version "
            "takes a mask of the first dims, and one value. For others use torch.where."
        )
    wide = mask.reshape((*mask.shape, *[1] * (x.dim() - mask.dim())))
    chosen: Any = torch.where(wide, value, cast("torch.Tensor", x))
    x.local = chosen.to(x.dtype).redistribute(x.layout).local


def _as_set(target: Sharded, value: Any) -> Any:
    """This rank's part of what is set, from a number or a tensor that broadcasts."""
    if not isinstance(value, (Sharded, torch.Tensor)):
        return value
    everywhere = replicated(value.gather(), target.mesh) if isinstance(value, Sharded) else value
    return line_up(target, everywhere)[0][1].to(target.dtype)


@implements(torch.narrow, _T.narrow)
def narrow(input: Sharded, dim: int, start: int, length: int) -> Sharded:  # noqa: A002 - torch's name
    """`length` indices starting at `start`."""
    dim, start = _dim(input, dim), operator.index(start)
    extent = input.shape[dim]
    first = start + extent if start < 0 else start
    if not 0 <= first <= first + length <= extent:
        raise OutOfRangeError(f"`start` (={start}) and `length` (={length}) must lie in dim {dim} of extent {extent}.")
    return getitem(input, (*[slice(None)] * dim, slice(first, first + length)))


@implements(torch.select, _T.select)
def select(input: Sharded, dim: int, index: int) -> Sharded:  # noqa: A002
    """One index of a dim, which is removed."""
    return getitem(input, (*[slice(None)] * _dim(input, dim), index))


@implements(torch.flip, _T.flip)
def flip(input: Sharded, *listed: Any, dims: Sequence[int] = ()) -> Sharded:  # noqa: A002
    """Reverse dims; a cut dim keeps its partition, so parts exchange places."""
    chosen = {_dim(input, dim) for dim in _listed(listed or (dims,))}
    maps: tuple[DimMap, ...] = tuple(
        Strided(extent - 1, -1, extent) if dim in chosen else Same() for dim, extent in enumerate(input.shape)
    )
    return input.like(fetch(input, input.layout, maps).flip(tuple(chosen)))


@implements(torch.roll, _T.roll)
def roll(input: Sharded, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Sharded:  # noqa: A002
    """Shift dims circularly: pad one end circularly and crop the other by the same amount."""
    by = _listed([shifts])
    along = _listed([dims]) if dims is not None else [0] * (input.dim() == 1)
    if len(by) != len(along):
        raise UnsupportedError(
            f"`dims` (={dims}) must name a dim for each of `shifts` (={shifts}); rolling all dims as one has no split "
            "version."
        )
    total = dict.fromkeys(range(input.dim()), 0)
    for shift, dim in zip(by, along, strict=True):
        total[_dim(input, dim)] += shift
    maps = tuple(_rolled(total[dim], extent) for dim, extent in enumerate(input.shape))
    local = fetch(input, input.layout, maps)
    return input.like(fold_borders(local, maps, input.box, input.shape))


def _rolled(shift: int, extent: int) -> DimMap:
    by = shift % extent if extent else 0
    return Padded(by, -by, "circular") if by else Same()


def _dim(x: Sharded, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise OutOfRangeError(f"`dim` (={dim}) must be from {-x.dim()} to {x.dim() - 1} for {x.dim()} dims.")
    return dim % x.dim()


def _listed(values: Sequence[Any]) -> list[int]:
    """`f(0, 1)` and `f((0, 1))` mean the same."""
    (first, *rest) = values
    return [first, *rest] if isinstance(first, int) else list(first)


def _expand(index: Any, dims: int) -> list[Any]:
    """One pick for each dim, and `None` for each new one."""
    picks = list(index) if isinstance(index, tuple) else [index]
    for pick in picks:
        if not (pick is None or pick is Ellipsis or _is_whole(pick) or isinstance(pick, slice)):
            raise UnsupportedError(
                f"`index` holds a {type(pick).__name__}; split indexing takes integers, slices, None, `...` and one "
                "list of integers. Use torch.where or a product instead of a mask, or index `x.gather()`."
            )
    named = sum(pick is not None and pick is not Ellipsis for pick in picks)
    dots = [place for place, pick in enumerate(picks) if pick is Ellipsis] or [len(picks)]
    if named > dims or len(dots) > 1:
        raise OutOfRangeError(f"`index` (={index}) must name at most {dims} dims, with at most one `...`.")
    return [*picks[: dots[0]], *[slice(None)] * (dims - named), *picks[dots[0] + 1 :]]


def _is_whole(pick: Any) -> bool:
    return isinstance(pick, Integral) and not isinstance(pick, bool)


def _maps(picks: Sequence[Any], shape: Sequence[int]) -> tuple[DimMap, ...]:
    return tuple(_map(dim, pick, extent) for dim, (pick, extent) in enumerate(zip(picks, shape, strict=True)))


def _map(dim: int, pick: Any, extent: int) -> DimMap:
    if isinstance(pick, slice):
        if pick.step is not None and pick.step < 1:
            raise UnsupportedError(
                f"`index` has step {pick.step} in dim {dim}; steps must be positive, use torch.flip."
            )
        start, stop, step = pick.indices(extent)
        count = len(range(start, stop, step))
        return Same() if count == extent else Strided(start, step, count)
    if not -extent <= pick < extent:
        raise OutOfRangeError(f"`index` (={pick}) is out of range for dim {dim} of extent {extent}.")
    return Strided(int(pick) % extent, 1, 1)


def _work(layout: Layout, maps: Sequence[DimMap], drops: Sequence[bool]) -> Layout:
    """The result's layout before dims picked by integers are removed; those dims are whole."""
    cuts = []
    for cut, dim_map, drop in zip(layout.cuts, maps, drops, strict=True):
        extent = dim_map.out_extent(cut.partition.extent)
        cuts.append(WHOLE_ONE if drop else Cut(cut.axes, cut.partition.rescale(extent)))
    return Layout(layout.mesh, cuts)


def _within(pick: Any) -> Any:
    """The pick relative to the fetched indices, which run from the first that it selects to the last."""
    if isinstance(pick, slice):
        return slice(None, None, pick.step)
    return None if pick is None else 0


def _arranged(work: Layout, picks: Sequence[Any]) -> Layout:
    """The layout without the dims picked by integers and with the new dims."""
    old = iter(work.cuts)
    cuts = [WHOLE_ONE if pick is None else next(old) for pick in picks]
    kept = (cut for cut, pick in zip(cuts, picks, strict=True) if not _is_whole(pick))
    return Layout(work.mesh, list(kept))
