"""Calls that treat samples one by one: of the batch, they depend only on the rank's own samples.

Such a call runs dry on this rank's samples alone, as if there were no others. It is then alike on all meshes that cut
the batch into parts of the same size, and in batches of any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from convmesh.dist import OpenMesh
from convmesh.layout import Layout
from convmesh.layout.layout import LAYOUTS_KEPT, Cut
from convmesh.lowering.any_extent import MANY, MOST_ELEMENTS, counts_alone, uncut
from convmesh.lowering.dry_call import DryCall
from convmesh.lowering.dry_values import Dry, DryResult, dries_in, mapped


@dataclass(frozen=True)
class SamplesApart:
    """A call on this rank's samples, which `cut` takes from the batch."""

    cut: Cut
    whole: Cut
    """This rank's samples, as if there were no others."""
    call: DryCall
    leaves: tuple[Any, ...]
    """Its arguments, without the samples of other ranks."""
    samples: int

    def in_any_number(self, mesh: OpenMesh) -> tuple[Any, ...] | None:
        """The arguments with `MANY` samples; None if its result may not be linear in their number.

        A single sample has an ambiguous memory order; CPU kernels are chosen by size.
        """
        dries = [leaf for leaf in self.leaves if isinstance(leaf, Dry)]
        is_large = any(math.prod(leaf.layout.box(mesh.rank).shape[1:]) > MOST_ELEMENTS for leaf in dries)
        is_cut_again = self.call.uses_sub_batches and mesh.settings.sub_batches > 1
        if self.samples < 2 or is_large or is_cut_again or not counts_alone(mesh) or not self.call.counts_samples:
            return None
        many = uncut(MANY)
        return tuple(x.lying_in(_with_samples(x.layout, many)) if isinstance(x, Dry) else x for x in self.leaves)

    def keeps_cuts(self, result: DryResult) -> bool:
        """Whether samples stayed where they are, and every axis that cut something still does.

        An axis that a layer can no longer use may cut samples further, which depends on all of them.
        """
        given = {name for leaf in self.leaves if isinstance(leaf, Dry) for name in leaf.layout.axes}
        made = [value.layout for value in dries_in(result.value)]
        return all(layout.cuts[:1] == (self.whole,) and given <= {*layout.axes} for layout in made)

    def joined(self, result: DryResult, mesh: OpenMesh) -> DryResult:
        """The result for the whole batch: values are cut by samples again, and so is the work on weights."""
        own = {*self.cut.axes}
        return replace(
            result,
            value=mapped(self._value, result.value),
            sum_axes=tuple(
                tuple(name for name in mesh.mesh.axes if name in own or name in axes) for axes in result.sum_axes
            ),
        )

    def _value(self, leaf: Any) -> Any:
        return leaf.lying_in(_with_samples(leaf.layout, self.cut)) if isinstance(leaf, Dry) else leaf


def samples_apart(call: DryCall, args: Any, leaves: Sequence[Any], mesh: OpenMesh) -> SamplesApart | None:
    """The call on this rank's samples; None if it looks at others, or moves samples."""
    cut = _shared_cut([leaf.layout for leaf in leaves if isinstance(leaf, Dry)])
    if cut is None or mesh.settings.sums_weights:
        return None
    alone = call.on_own_samples(cut.axes, args)
    if alone is None:
        return None
    samples = cut.partition.span(mesh.mesh.part(cut.axes, mesh.mesh.coordinates(mesh.rank))).extent
    whole = uncut(samples)
    here = [x.lying_in(_with_samples(x.layout, whole)) if isinstance(x, Dry) else x for x in leaves]
    return SamplesApart(cut, whole, alone, tuple(here), samples)


def _shared_cut(layouts: Sequence[Layout]) -> Cut | None:
    """The cut of the first dim, if all tensors share it."""
    first = layouts[0].cuts[0] if layouts and layouts[0].cuts else None
    return None if first is None or any(layout.cuts[:1] != (first,) for layout in layouts) else first


@lru_cache(maxsize=LAYOUTS_KEPT)
def _with_samples(layout: Layout, cut: Cut) -> Layout:
    return layout.replacing({0: cut})
