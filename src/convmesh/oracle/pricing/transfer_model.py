"""Seconds of a program's transfers: from a system's transfer table if it has one, else from its links."""

from __future__ import annotations

from collections.abc import Sequence

from convmesh.errors import UnknownNameError
from convmesh.layout.mesh import Mesh
from convmesh.oracle.pricing.assumptions import Assumptions
from convmesh.oracle.pricing.collectives.group_shape import Crossing, Shape
from convmesh.oracle.pricing.collectives.messages import seconds_all_to_all, seconds_message, seconds_packing
from convmesh.oracle.pricing.collectives.methods import PASSES, fastest
from convmesh.oracle.pricing.estimate import Basis, Estimate
from convmesh.plans.steps import Transfer
from convmesh.system import System
from convmesh.system.transfer_table import Overlap, Timed, TransferTable

SPREAD = 0.4
"""Usual relative error of a time from links: datasheets leave out congestion and tuning."""

SECONDS_UNEXPLAINED = 30e-6
"""How much longer all-reduces of 1 to 32 MiB inside nodes take than NCCL's own formula says."""

DEVICE_OVERLAP = Overlap(active=1, compute_slowdown=1.13, transfer_slowdown=1.13, hidden=1.0)
"""On GPUs: collectives take a few multiprocessors and memory bandwidth (Galvatron's default coefficient, 1.1256)."""


class TransferModel:
    """Prices messages and collectives of a mesh whose ranks sit on a system's nodes in order."""

    def __init__(self, system: System, mesh: Mesh, assumptions: Assumptions | None = None) -> None:
        self._system, self._mesh = system, mesh
        self._ranks_per_node = (assumptions or Assumptions()).ranks_per_node
        self._table: TransferTable | None = system.transfers
        self._shapes: dict[tuple[str, ...], Shape] = {}
        self._prices: dict[tuple[object, ...], Estimate] = {}
        self._ways: dict[tuple[int, int, bool], _Way] = {}

    @property
    def overlap(self) -> Overlap:
        """How transfers and computations slow each other down on this mesh's ranks."""
        measured = self._table.overlap(self._active) if self._table is not None else None
        return measured or DEVICE_OVERLAP

    def transfer(self, transfer: Transfer, rank: int) -> Estimate:
        """Seconds from when all ranks of a group have posted it to when all have its result.

        Copies before and after are among the program's computations, except for messages between stages.
        """
        if transfer.peer is not None:
            return self.exchange((transfer,), rank)
        key = (transfer.carrier, transfer.axes, transfer.bytes_sent)
        if key not in self._prices:
            self._prices[key] = self._collective(transfer)
        return self._prices[key]

    def exchange(self, messages: Sequence[Transfer], rank: int) -> Estimate:
        """Seconds of messages that a rank posts at once, such as a halo to all its neighbours.

        A halo takes as long as at its slowest edge: ranks wait for their neighbours, and those for theirs.
        """
        ways = tuple((m.carrier, m.bytes_sent, self._way(m, rank)) for m in messages if m.peer not in (None, rank))
        if not ways:
            return Estimate.exactly(0.0)
        if ways not in self._prices:
            self._prices[ways] = self._messages(ways)
        return self._prices[ways]

    def method(self, transfer: Transfer) -> str:
        """The method that the library would use for a collective; empty if it has no choice."""
        shape = self._shape(transfer.axes)
        if transfer.carrier not in PASSES or not shape.crossings:
            return ""
        return fastest(transfer.carrier, shape, transfer.bytes_sent, self._system.collectives.methods).method.name

    def _collective(self, transfer: Transfer) -> Estimate:
        carrier, bytes_sent, ranks = transfer.carrier, transfer.bytes_sent, self._mesh.extent(transfer.axes)
        if ranks < 2:
            return Estimate.exactly(0.0)
        if timed := self._timed(carrier, ranks, bytes_sent, transfer.axes):
            return _measured(timed)
        shape = self._shape(transfer.axes)
        if carrier == "all_to_all":
            seconds = seconds_all_to_all(shape, bytes_sent, self._system.collectives.methods)
            return self._modelled(shape, seconds)
        if carrier not in PASSES:
            raise UnknownNameError.of("carrier", carrier, [*PASSES, "all_to_all", "neighbour", "stage"])
        seconds = fastest(carrier, shape, bytes_sent, self._system.collectives.methods).seconds
        return self._modelled(shape, seconds)

    def _messages(self, ways: tuple[tuple[str, int, _Way], ...]) -> Estimate:
        carrier, total = ways[0][0], sum(size for _, size, _ in ways)
        axes = tuple(dict.fromkeys(name for _, _, way in ways for name in way[0]))
        if timed := self._timed(carrier, 1 + len(ways), total, axes):
            return _measured(timed)
        shape = self._shape(axes)
        by_level: dict[str, float] = {}
        latest = 0.0
        for _, size, way in ways:
            crossing = self._crossing(way)
            taken = seconds_message(crossing, size, self._senders(crossing, way))
            latency = float(crossing.level.seconds_latency)
            by_level[crossing.level.name] = by_level.get(crossing.level.name, 0.0) + taken - latency
            latest = max(latest, latency)
        packing = seconds_packing(self._system.device, total) if carrier == "stage" else 0.0
        return self._modelled(shape, latest + max(by_level.values()) + packing)

    def _way(self, message: Transfer, rank: int) -> _Way:
        """A message's axes and distance in ranks; between stages also its level of links, which may vary by stage."""
        assert message.peer is not None
        key = (rank, message.peer, message.carrier == "stage")
        if key not in self._ways:
            self._ways[key] = self._new_way(*key)
        return self._ways[key]

    def _new_way(self, rank: int, peer: int, between_stages: bool) -> _Way:
        here, there = self._mesh.coordinates(rank), self._mesh.coordinates(peer)
        axes = tuple(name for name in self._mesh.axes if here[name] != there[name])
        level = self._system.level_between(rank, peer, self._ranks_per_node)
        fixed = level.name if between_stages and level is not None else ""
        return axes, abs(peer - rank), fixed

    def _crossing(self, way: _Way) -> Crossing:
        """The outermost level that such messages cross anywhere in the mesh, or the fixed one."""
        crossings = self._shape(way[0]).crossings
        return next((c for c in crossings if c.level.name == way[2]), crossings[-1])

    def _senders(self, crossing: Crossing, way: _Way) -> int:
        """Ranks of one inner block whose messages leave it: those within `distance` of the border."""
        inner = crossing.members * crossing.sharing
        return min(inner, way[1])

    def _shape(self, axes: tuple[str, ...]) -> Shape:
        if axes not in self._shapes:
            self._shapes[axes] = Shape.of(self._system, self._mesh, axes, self._ranks_per_node)
        return self._shapes[axes]

    @property
    def _active(self) -> int:
        """Ranks on one node."""
        return min(self._mesh.size, self._ranks_per_node or int(self._system.node.devices))

    def _timed(self, carrier: str, ranks: int, bytes_sent: int, axes: tuple[str, ...]) -> Timed | None:
        """The time from the table, which covers ranks on one node."""
        if self._table is None or self._system.nodes(self._mesh, axes, self._ranks_per_node) > 1:
            return None
        return self._table.seconds(carrier, ranks=ranks, active=self._active, bytes_sent=bytes_sent)

    def _modelled(self, shape: Shape, seconds: float) -> Estimate:
        guessed = any(crossing.level.bytes_per_second.origin == "guess" for crossing in shape.crossings)
        basis: Basis = "guess" if guessed else "model"
        return Estimate(seconds, seconds * (1 - SPREAD), seconds * (1 + SPREAD) + SECONDS_UNEXPLAINED, basis)


_Way = tuple[tuple[str, ...], int, str]


def _measured(timed: Timed) -> Estimate:
    return Estimate.of(timed.seconds, "measured" if timed.measured else "interpolated", timed.spread)
