"""Stand-ins: a few ranks are evaluated, and every other rank behaves like one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from convmesh.layout.mesh import SPACE_AXES, Mesh, whole_axis
from convmesh.system.placement import RankGroup


class Crowd:
    """The evaluated ranks of a mesh."""

    def __init__(self, mesh: Mesh, ranks: Iterable[int]) -> None:
        self._mesh = mesh
        self.ranks = tuple(ranks)
        self._places = {rank: mesh.coordinates(rank) for rank in self.ranks}
        self._values = {axis: sorted({place[axis] for place in self._places.values()}) for axis in mesh.axes}
        self._stand_ins: dict[int, int] = {}
        self._groups: dict[tuple[int, tuple[str, ...]], tuple[int, ...]] = {}

    def stand_in(self, rank: int) -> int:
        """The evaluated rank that behaves like `rank`: itself, or the nearest that is also at a border, or inside."""
        if rank in self._places:
            return rank
        if rank not in self._stand_ins:
            self._stand_ins[rank] = min(self.ranks, key=lambda other: self._distance(rank, other))
        return self._stand_ins[rank]

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Stand-ins of the ranks that differ from `rank` along `axes` only, `rank` included."""
        key = (rank, axes)
        if key not in self._groups:
            here, group = self._places[rank], RankGroup.of(self._mesh, axes)
            varied = {whole_axis(name) for name in axes}
            chosen = [self._values[axis] if axis in varied else [here[axis]] for axis in self._mesh.axes]
            places = itertools.product(*chosen)
            ranks = (self._mesh.rank(dict(zip(self._mesh.axes, place, strict=True))) for place in places)
            members = (other for other in ranks if group.first(other) == group.first(rank))
            self._groups[key] = tuple(sorted({rank, *map(self.stand_in, members)}))
        return self._groups[key]

    def _distance(self, rank: int, other: int) -> tuple[int, int, int]:
        here, there = self._mesh.coordinates(rank), self._places[other]
        stages = int(here.get("pipe") != there.get("pipe"))
        space = (axis for axis in SPACE_AXES if axis in here)  # along these, ranks at a border differ from others
        kinds = sum(self._side(axis, here[axis]) != self._side(axis, there[axis]) for axis in space)
        return stages, kinds, sum(abs(here[axis] - there[axis]) for axis in here)

    def _side(self, axis: str, place: int) -> int:
        return -1 if place == 0 else int(place == self._mesh.axes[axis] - 1)
