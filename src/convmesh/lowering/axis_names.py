"""Other names for the axes of a mesh: what a call does along one axis, it does along another of the same kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from convmesh.layout import Layout, Mesh
from convmesh.layout.channels import ChannelSplit
from convmesh.layout.layout import LAYOUTS_KEPT, Cut
from convmesh.layout.mesh import CHANNEL_AXES
from convmesh.plans import Split
from convmesh.plans.split import DIMS

Axes = tuple[str, ...]


@dataclass(frozen=True)
class AxisNames:
    """Renames some axes; the others keep their names. The order of the axes stays."""

    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def shared(cls, used: Iterable[str]) -> AxisNames:
        """Names under which calls are alike: a single channel axis always takes the name of the first."""
        first, second = CHANNEL_AXES
        names = {*used}
        return cls(((second, first),)) if second in names and first not in names else _SAME

    @property
    def back(self) -> AxisNames:
        """The renaming back to the original names."""
        return AxisNames(tuple((new, old) for old, new in self.pairs))

    def axes(self, axes: Axes) -> Axes:
        table = dict(self.pairs)
        return tuple(table.get(name, name) for name in axes) if table else axes

    def cuts(self, cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
        return tuple(Cut(self.axes(cut.axes), cut.partition) for cut in cuts) if self.pairs else cuts

    def split(self, split: Split | None) -> Split | None:
        return _renamed(split, self) if split is not None and self.pairs else split

    def weight_split(self, split: ChannelSplit | None) -> ChannelSplit | None:
        if split is None or not self.pairs:
            return split
        return replace(split, kept=self.axes(split.kept), gathered=self.axes(split.gathered))


_SAME = AxisNames()


@cache
def _renamed(split: Split, names: AxisNames) -> Split:
    axes: dict[str, Any] = {dim: names.axes(getattr(split, dim)) for dim in DIMS}
    return replace(split, **axes)


@lru_cache(maxsize=LAYOUTS_KEPT)
def layout_on(layout: Layout, mesh: Mesh, names: AxisNames) -> Layout:
    """A layout on a mesh with more or fewer axes that it does not use, and other names for the rest."""
    return layout if layout.mesh == mesh and not names.pairs else type(layout)(mesh, names.cuts(layout.cuts))
