"""How long the transfers of a program take on a system's links."""

from __future__ import annotations

from convmesh.layout.mesh import Mesh
from convmesh.oracle.assumptions import Assumptions
from convmesh.oracle.estimate import Estimate
from convmesh.plan.program import Transfer
from convmesh.system import LinkLevel, System


class TransferModel:
    """Prices messages and collectives of a mesh whose ranks sit on a system's nodes in order."""

    def __init__(self, system: System, mesh: Mesh, assumptions: Assumptions | None = None) -> None:
        self._system, self._mesh = system, mesh
        self._ranks_per_node = (assumptions or Assumptions()).ranks_per_node

    def transfer(self, transfer: Transfer, rank: int) -> Estimate:
        """Seconds from when all ranks of a group have posted it to when all of them have its result."""
        if transfer.peer is not None:
            level = self._system.level_between(rank, transfer.peer, self._ranks_per_node)
            return self._message(level, transfer.bytes_sent) if level else Estimate.exactly(0.0)
        spans = self._system.spans(self._mesh, transfer.axes, self._ranks_per_node)
        crossed = [level for level in self._system.links if spans[level.name].blocks > 1]
        if not crossed:
            return Estimate.exactly(0.0)
        steps = self._mesh.extent(transfer.axes) - 1
        latency = steps * float(crossed[-1].seconds_latency)
        slowest = min(level.bytes_per_second_each for level in crossed)
        return Estimate.of(latency + transfer.bytes_sent / slowest, "model", 0.5)

    def _message(self, level: LinkLevel, size: int) -> Estimate:
        return Estimate.of(float(level.seconds_latency) + size / level.bytes_per_second_each, "model", 0.5)
