"""Products of several tensors that sum over some of their dims, as einsum writes them.

Every dim has a label. A label that stays in the result keeps the cut of the largest operand that cuts it. An axis cuts
only one label, so of two operands cut by one axis along different dims the smaller is gathered. A label that is summed
over stays cut if all its operands are cut alike and summing the ranks' partial results moves less than gathering the
operands would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from convmesh.dist import copy_over, sum_over
from convmesh.layout import Cut, Layout, Partition
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.layout.maps import DimMap, Same, Whole
from convmesh.ops.core.exchange_plans import Maps
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.sharded import Sharded

Labels = tuple[str, ...]
Local = Callable[..., torch.Tensor]


class Contraction(NamedTuple):
    """The labels of each operand's dims and of the result's. Operands may have extent 1 where others have more."""

    operands: tuple[Labels, ...]
    result: Labels
    whole: frozenset[str] = frozenset()
    """Labels that must not be cut."""


class Arrangement(NamedTuple):
    """The layouts that operands take and the result has, and the axes that partial results are summed over."""

    operands: tuple[Layout, ...]
    result: Layout
    summed: tuple[str, ...]


def contract(terms: Contraction, operands: Sequence[Sharded], product: Local) -> Sharded:
    """`product` of the ranks' parts of the operands, which is the product of the whole tensors."""
    mesh, plan = operands[0].mesh, arrangement(terms, tuple(x.layout for x in operands))
    work = {*plan.result.axes, *plan.summed}
    local = [fetched(x, layout, work) for x, layout in zip(operands, plan.operands, strict=True)]
    return Sharded(sum_over(product(*local), mesh, plan.summed), plan.result, mesh)


def fetched(x: Sharded, target: Layout, work: set[str]) -> torch.Tensor:
    """What this rank needs of an operand; backward sums its gradient over the axes that cut the work but not it."""
    others = frozenset(work - {*target.axes})
    demanded, maps = _gathered(x.layout, target, others)
    kept = tuple(name for name in x.mesh.mesh.axes if name in others and name not in demanded.axes)
    (local,) = copy_over(x.mesh, kept, fetch(x, demanded, maps))
    assert local is not None
    return local


@lru_cache(maxsize=LAYOUTS_KEPT)
def _gathered(source: Layout, target: Layout, others: frozenset[str]) -> tuple[Layout, Maps]:
    """An operand's needs as those of work cut along the dims that it is gathered in: each part needs all of them.

    So a gradient is scattered as it is summed, whereas a copy's would be summed everywhere.
    """
    cuts = [*target.cuts]
    maps: list[DimMap] = [Same()] * len(cuts)
    for dim, (axes, partition) in enumerate(source.cuts):
        if axes and not target.is_cut(dim) and {*axes} <= others:
            cuts[dim] = Cut(axes, Partition.even(partition.parts, partition.parts))
            maps[dim] = Whole(partition.parts)
    return Layout(target.mesh, cuts), tuple(maps)


@lru_cache(maxsize=LAYOUTS_KEPT)
def arrangement(terms: Contraction, given: tuple[Layout, ...]) -> Arrangement:
    """How a product is cut, given how its operands are."""
    mesh, extents = given[0].mesh, _extents(terms, given)
    cuts = _result_cuts(terms, given, extents)
    used = {name for cut in cuts.values() for name in cut.axes}
    summed = _summed_cuts(terms, given, extents, used)
    cuts |= summed
    return Arrangement(
        operands=tuple(_cut(layout, labels, cuts) for labels, layout in zip(terms.operands, given, strict=True)),
        result=_cut(Layout.of(mesh, [extents[label] for label in terms.result]), terms.result, cuts),
        summed=tuple(name for name in mesh.axes if any(name in cut.axes for cut in summed.values())),
    )


def _extents(terms: Contraction, given: Sequence[Layout]) -> dict[str, int]:
    extents: dict[str, int] = {}
    for labels, layout in zip(terms.operands, given, strict=True):
        for label, extent in zip(labels, layout.shape, strict=True):
            extents[label] = extent if extents.get(label, 1) == 1 else extents[label]
    return extents


def _result_cuts(terms: Contraction, given: Sequence[Layout], extents: dict[str, int]) -> dict[str, Cut]:
    cuts: dict[str, Cut] = {}
    used: set[str] = set()
    largest_first = sorted(zip(terms.operands, given, strict=True), key=lambda pair: -math.prod(pair[1].shape))
    for labels, layout in largest_first:
        for label, cut in zip(labels, layout.cuts, strict=True):
            is_free = label in terms.result and label not in terms.whole and label not in cuts
            if is_free and cut.axes and cut.partition.extent == extents[label] and not used & {*cut.axes}:
                cuts[label] = cut
                used |= {*cut.axes}
    return cuts


def _summed_cuts(
    terms: Contraction, given: Sequence[Layout], extents: dict[str, int], used: set[str]
) -> dict[str, Cut]:
    """Cuts of labels that are summed over: those that all their operands share, if that is cheaper than gathering."""
    held: dict[str, list[Cut]] = {
        label: [] for labels in terms.operands for label in labels if label not in terms.result
    }
    for labels, layout in zip(terms.operands, given, strict=True):
        for label in {*labels} & {*held}:
            held[label].append(layout.cuts[labels.index(label)])
    made = math.prod(extents[label] for label in terms.result)
    moved = sum(math.prod(layout.shape) for layout in given)
    cuts: dict[str, Cut] = {}
    for label, holders in held.items():
        cut = holders[0]
        alike = bool(cut.axes) and all(other == cut for other in holders) and not used & {*cut.axes}
        if alike and label not in terms.whole and 2 * made <= moved:
            cuts[label] = cut
            used = used | {*cut.axes}
    return cuts


def _cut(layout: Layout, labels: Labels, cuts: dict[str, Cut]) -> Layout:
    whole = Layout.of(layout.mesh, layout.shape)
    chosen = {
        dim: cuts[label]
        for dim, label in enumerate(labels)
        if label in cuts and cuts[label].partition.extent == layout.shape[dim]
    }
    return whole.replacing(chosen)
