"""Flatten, reshape, view and unflatten.

Unchanged dims keep their cuts. In a group of dims that are merged or split, only the cut of the leading dim can stay,
and only if its parts begin at whole indices of the new leading dim. All other cut dims of the group are made whole
first. The axes that this frees cut the samples (dim 0), in addition to the axes that already do, if the global batch
has at least as many samples as those axes have ranks; otherwise they replicate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from convmesh.errors import UnsupportedError
from convmesh.layout import Cut, Layout, Partition
from convmesh.layout.layout import LAYOUTS_KEPT, fair_cut
from convmesh.ops.core.by_samples import by_samples, from_second_dim
from convmesh.ops.core.probe import probe
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded

_T = torch.Tensor

RESHAPING: tuple[Callable[..., Any], ...] = (
    torch.flatten, _T.flatten, torch.reshape, _T.reshape, _T.view, torch.unflatten, _T.unflatten,
)  # fmt: skip


def _register(function: Callable[..., Any]) -> None:
    @implements(function, takes_folded=True)
    def split(x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
        # torch itself reads the arguments (-1, one tuple or many numbers, negative dims), on a tensor without data.
        wanted = function(probe(x), *args, **kwargs)
        if wanted.dtype != x.dtype:
            raise UnsupportedError(
                f"`dtype` (={wanted.dtype}): a split view changes only the shape; use `x.to(dtype)`."
            )
        return reshape(x, tuple(wanted.shape))


for _function in RESHAPING:
    _register(_function)
by_samples(torch.flatten, _T.flatten, when=from_second_dim)


@implements(_T.view_as, _T.reshape_as)
def reshape_as(x: Sharded, other: Sharded | torch.Tensor) -> Sharded:
    """`x` in the shape of `other`."""
    return reshape(x, tuple(other.shape))


def reshape(x: Sharded, shape: tuple[int, ...]) -> Sharded:
    """`x` in another global shape with the same number of elements, by the rule of this module."""
    if shape == tuple(x.shape):
        return x
    x = x.unfolded  # the order of its elements is the same
    before, after = reshaped_layouts(x.layout, shape)
    local = x.redistribute(before).local
    return Sharded(local.reshape(after.box(x.mesh.rank).shape), after, x.mesh)


def make_whole(x: Sharded, dims: Sequence[int]) -> Sharded:
    """`x` with `dims` no longer cut; the freed axes cut the samples if there are enough, else they replicate."""
    return x.redistribute(whole_layout(x.layout, dims))


def whole_layout(layout: Layout, dims: Sequence[int]) -> Layout:
    """The layout of `make_whole`. A sample dim that is itself made whole receives no axes."""
    freed = layout.axes_of(dims)
    if not freed:
        return layout
    whole = layout.with_whole([dim for dim in dims if layout.is_cut(dim)])
    if 0 in {dim % len(layout.cuts) for dim in dims}:
        return whole
    axes = (*layout.cuts[0].axes, *freed)
    samples, parts = layout.shape[0], layout.mesh.extent(axes)
    return whole.replacing({0: fair_cut(layout.mesh, samples, axes)}) if samples >= parts else whole


class Group(NamedTuple):
    """Adjacent input dims that become adjacent output dims, with the same elements in the same order."""

    old: tuple[int, ...]
    new: tuple[int, ...]


def match_dims(old: Sequence[int], new: Sequence[int]) -> list[Group]:
    """The smallest groups of dims with equal numbers of elements that turn one shape into the other."""
    if 0 in old:
        return [Group(tuple(range(len(old))), tuple(range(len(new))))]
    groups, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        first_i, first_j, elements_old, elements_new = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while elements_old != elements_new:
            if elements_old < elements_new:
                elements_old, i = elements_old * old[i], i + 1
            else:
                elements_new, j = elements_new * new[j], j + 1
        groups.append(Group(tuple(range(first_i, i)), tuple(range(first_j, j))))
    return [*groups, Group(tuple(range(i, len(old))), tuple(range(j, len(new))))]  # trailing dims of extent 1


@lru_cache(maxsize=LAYOUTS_KEPT)
def reshaped_layouts(layout: Layout, shape: tuple[int, ...]) -> tuple[Layout, Layout]:
    """The layout that the input must have, and the output's layout; each rank keeps its elements."""
    groups = match_dims(layout.shape, shape)
    carried = _carried(layout, shape, groups)
    blocked = [dim for dim in _cut_dims(layout) if dim not in carried]
    before = whole_layout(layout, blocked)
    after = _carried(before, shape, groups)
    if any(dim not in after for dim in _cut_dims(before)):
        # Cut into more parts, the samples would no longer begin at whole indices of the new leading dim.
        before, after = layout.with_whole(blocked), carried
    return before, Layout.of(layout.mesh, shape).replacing(dict(after.values()))


def _cut_dims(layout: Layout) -> list[int]:
    return [dim for dim in range(len(layout.cuts)) if layout.is_cut(dim)]


def _carried(layout: Layout, shape: tuple[int, ...], groups: list[Group]) -> dict[int, tuple[int, Cut]]:
    """Leading input dim → leading output dim and its cut, for the groups where every part begins at a whole index."""
    carried: dict[int, tuple[int, Cut]] = {}
    for old, new in groups:
        source, target = _leading(old, layout.shape), _leading(new, shape)
        if source is None or target is None:
            continue
        axes, partition = layout.cuts[source]
        below, step = math.prod(layout.shape[source + 1 : old[-1] + 1]), math.prod(shape[target + 1 : new[-1] + 1])
        if step and not any(bound * below % step for bound in partition.bounds):
            carried[source] = target, Cut(axes, Partition([bound * below // step for bound in partition.bounds]))
    return carried


def _leading(dims: tuple[int, ...], shape: Sequence[int]) -> int | None:
    """The dim that varies slowest; dims of extent 1 do not vary."""
    return next((dim for dim in dims if shape[dim] != 1), dims[0] if dims else None)
