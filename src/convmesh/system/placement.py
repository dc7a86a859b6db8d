"""Placement of ranks on devices, and how the groups of a mesh span a cluster's levels; integer arithmetic only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from convmesh.layout.mesh import Mesh, along


@dataclass(frozen=True, slots=True)
class RankGroup:
    """All groups that some axes form among `world` ranks: members differ by i·stride, i < extent, for each pair."""

    world: int
    strides: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, mesh: Mesh, axes: Iterable[str]) -> RankGroup:
        """The groups along `axes`."""
        return cls(mesh.size, tuple(mesh.stretches(axes)))

    @property
    def size(self) -> int:
        """Ranks in one group."""
        return math.prod(extent for _, extent in self.strides)

    def first(self, rank: int) -> int:
        """The lowest rank of a rank's group, which identifies the group."""
        return rank - sum(rank // stride % extent * stride for stride, extent in self.strides)


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """How groups span one level, which joins blocks of the level inside it; each number is the largest of any group."""

    blocks: int
    """Inner blocks that hold ranks of one group, within one block of this level."""
    members: int
    """Ranks of one group in one inner block."""
    sharing: int
    """Groups with ranks in the same inner block that use this level at once, and so share its ports."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks in order on nodes, each on the next device; every node uses its first `ranks_per_node` devices."""

    extents: tuple[int | None, ...]
    """Devices in a block of each level, from the inside out; None joins all."""
    devices_per_node: int
    ranks_per_node: int

    def device(self, rank: int) -> int:
        """The index, within the whole cluster, of the device that a rank drives."""
        node, place = divmod(rank, self.ranks_per_node)
        return node * self.devices_per_node + place

    def block(self, rank: int, level: int) -> int:
        """The block of a level that holds a rank; level -1 is the device itself."""
        if level < 0:
            return self.device(rank)
        extent = self.extents[level]
        return 0 if extent is None else self.device(rank) // extent

    def level_between(self, a: int, b: int) -> int | None:
        """The innermost level that joins two ranks; None for a rank with itself."""
        levels = range(-1, len(self.extents))
        joining = next((level for level in levels if self.block(a, level) == self.block(b, level)), len(self.extents))
        return None if joining < 0 else joining

    def levels_for(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The levels that messages among these ranks use."""
        members = list(ranks)
        return tuple(
            level
            for level in range(len(self.extents))
            if len({(self.block(r, level), self.block(r, level - 1)) for r in members})
            > len({self.block(r, level) for r in members})
        )

    def nodes(self, group: RankGroup) -> int:
        """The most nodes that any group has ranks on."""
        return _span(self._inside_nodes(), group, 1).blocks

    def spans(self, group: RankGroup) -> tuple[GroupSpan, ...]:
        """How the groups span every level, from the inside out."""
        return tuple(_span(self, group, level) for level in range(len(self.extents)))

    def _inside_nodes(self) -> Placement:
        return Placement((self.devices_per_node, None), self.devices_per_node, self.ranks_per_node)

    def ranks_in_block(self, level: int) -> int | None:
        """Ranks in every full block of a level; 0 if that varies, None if one block joins all."""
        extent = 1 if level < 0 else self.extents[level]
        if extent is None:
            return None
        if extent % self.devices_per_node == 0:
            return extent // self.devices_per_node * self.ranks_per_node
        if self.ranks_per_node <= extent:
            return self.ranks_per_node
        return extent if self.ranks_per_node % extent == 0 else 0


@lru_cache(maxsize=65536)
def _span(placement: Placement, group: RankGroup, level: int) -> GroupSpan:
    inner, outer = placement.ranks_in_block(level - 1), placement.ranks_in_block(level)
    regular = _regular_span(group, inner, outer) if inner != 0 and outer != 0 else None
    return regular or _counted_span(placement, group, level)


def _regular_span(group: RankGroup, inner: int | None, outer: int | None) -> GroupSpan | None:
    """The span by products, if blocks divide the mesh evenly and so are all alike; None if they do not."""
    outer = None if outer is not None and outer >= group.world else outer
    if inner is None or inner >= group.world:
        return GroupSpan(1, group.size, 0)
    if group.world % inner or (outer is not None and group.world % outer):
        return None
    within = [(along(*pair, inner), along(*pair, outer)) for pair in group.strides]
    if not all(small and large for small, large in within):
        return None
    members = math.prod(small for small, _ in within)
    blocks = math.prod(large for _, large in within) // members
    return GroupSpan(blocks, members, inner // members if blocks > 1 else 0)


def _counted_span(placement: Placement, group: RankGroup, level: int) -> GroupSpan:
    members: Counter[tuple[int, int, int]] = Counter()
    for rank in range(group.world):
        members[group.first(rank), placement.block(rank, level), placement.block(rank, level - 1)] += 1
    blocks = Counter((first, outer) for first, outer, _ in members)
    sharing = Counter(inner for first, outer, inner in members if blocks[first, outer] > 1)
    return GroupSpan(max(blocks.values()), max(members.values()), max(sharing.values(), default=0))
