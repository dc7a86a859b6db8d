"""How groups along mesh axes spread over a cluster's links, and the bandwidth that each group gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from convmesh.layout.mesh import Mesh
from convmesh.system import GroupSpan, LinkLevel, Placement, System

RING_LINKS = 2
"""Links of a device that rings use, if a group lacks some of the devices that are linked in pairs."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """One level of links that the messages of a group cross, between `blocks` of the level inside it."""

    level: LinkLevel
    blocks: int
    members: int
    """Ranks of the group in one inner block."""
    sharing: int
    """Groups that have ranks in one inner block and cross the level at once."""
    ports: float
    """Ports into the level of the inner block with the fewest ranks; less than one where blocks share a port."""
    fraction: float
    """Share of a port's bandwidth that carries data."""
    whole: bool
    """Whether the group has ranks in all blocks that the level joins, and so uses all links of a port."""

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth into or out of one inner block for one group: its share of the ports, less with few peers."""
        shared = self._port * self.ports / self.sharing / self.level.oversubscription.value
        pair = self.level.bytes_per_second_pair
        if pair is None or self.whole:
            return shared
        return min(shared, pair.value * self.fraction * self.members * min(RING_LINKS, self.blocks - 1))

    def bytes_per_second_message(self, senders: int) -> float:
        """Bandwidth of one message while `senders` ranks of a block send one each; a rank drives one port."""
        pair = self.level.bytes_per_second_pair
        most = self._port * self.ports / max(1, senders) / self.level.oversubscription.value
        return min(most, self._port, pair.value * self.fraction if pair is not None else most)

    @property
    def bytes_per_second_rank(self) -> float:
        """Bandwidth of one rank while every rank of its block sends."""
        return self.bytes_per_second / self.members

    @property
    def _port(self) -> float:
        return self.level.bytes_per_second.value * self.fraction


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups of `ranks` ranks and the levels that they cross, from the inside out."""

    ranks: int
    crossings: tuple[Crossing, ...]

    @classmethod
    def of(cls, system: System, mesh: Mesh, axes: tuple[str, ...], ranks_per_node: int | None = None) -> Shape:
        """The groups of a mesh along `axes`, ranks on nodes in order."""
        spans = system.spans(mesh, axes, ranks_per_node)
        placement = system.placement(ranks_per_node)
        crossed = (
            _crossing(system, index, spans[level.name], placement, (mesh.size, mesh.extent(axes)))
            for index, level in enumerate(system.links)
            if spans[level.name].blocks > 1
        )
        return cls(mesh.extent(axes), tuple(crossed))

    @property
    def media(self) -> frozenset[str]:
        return frozenset(crossing.level.medium for crossing in self.crossings)

    @property
    def inside(self) -> tuple[Crossing, ...]:
        """The levels within a node."""
        return tuple(crossing for crossing in self.crossings if crossing.level.medium != "network")

    @property
    def outside(self) -> tuple[Crossing, ...]:
        """The levels between nodes."""
        return tuple(crossing for crossing in self.crossings if crossing.level.medium == "network")

    @property
    def nodes(self) -> int:
        """Nodes with ranks of one group."""
        nodes = 1
        for crossing in self.outside:
            nodes *= crossing.blocks
        return nodes

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.ranks // self.nodes)

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of a ring through all ranks: that of its slowest link."""
        direct = [c for c in self.inside if c.level.medium == "nvlink" and c.whole]
        if len(direct) < 2:
            return min(crossing.bytes_per_second for crossing in self.crossings)
        # The group has all links of every device, so rings use those of all levels.
        joined = sum(crossing.bytes_per_second / crossing.ports for crossing in direct)
        return min([joined, *(c.bytes_per_second for c in self.crossings if c not in direct)])

    def ring_edges(self) -> Iterator[tuple[str, int]]:
        """By medium: edges of a ring that visits block after block."""
        outer = 0
        for crossing in reversed(self.crossings):
            blocks = max(1, outer) * crossing.blocks
            yield crossing.level.medium, blocks - outer
            outer = blocks


def _crossing(system: System, index: int, span: GroupSpan, placement: Placement, sizes: tuple[int, int]) -> Crossing:
    """`sizes` are those of the mesh and of a group."""
    level, (world, ranks) = system.links[index], sizes
    # Ranks take the first devices of a node, so at most that many share a port.
    sharers = min(int(level.shared_by), placement.ranks_per_node, world)
    fraction = system.collectives.fraction_wire.get(level.medium)
    extent = placement.extents[index]
    return Crossing(
        level,
        span.blocks,
        span.members,
        sharing=max(1, span.sharing),
        ports=_ranks_inside(placement, index, world) * _fullness(span, ranks) / sharers,
        fraction=float(fraction or 1.0),
        whole=extent is not None and min(ranks, span.blocks * span.members) >= extent,
    )


def _fullness(span: GroupSpan, ranks: int) -> float:
    """A group's ranks in its emptiest block, as a fraction of those in a full one."""
    return max(1, min(span.members, ranks - span.members * (span.blocks - 1))) / span.members


def _ranks_inside(placement: Placement, index: int, world: int) -> int:
    """Ranks in one block of the next inner level; its devices where that varies."""
    ranks = placement.ranks_in_block(index - 1)
    if ranks == 0:
        ranks = placement.extents[index - 1]
    return min(ranks or world, world)
