"""What one node of a network costs on a system, apart from its neighbours: seconds of a step, and bytes held."""

from __future__ import annotations

import math
from collections.abc import Iterable

from convmesh.dist import dry_mesh
from convmesh.dist.cut_weights import local_shape
from convmesh.gradients.reduction import BYTES_BUCKET
from convmesh.graph import Weight
from convmesh.layout import Mesh
from convmesh.lowering.gradient_sums import with_sums
from convmesh.lowering.node_options import Single
from convmesh.oracle import Assumptions
from convmesh.oracle.pricing.assumptions import STATES
from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.oracle.simulate.priced_steps import Pricing
from convmesh.planner.predicting import representatives
from convmesh.plans import Program, WeightProgram
from convmesh.plans.steps import bytes_each
from convmesh.plans.summing import Summing
from convmesh.system import System


class NodePrices:
    """Prices single nodes as the simulation of a step does, but with nothing overlapping."""

    def __init__(self, system: System, mesh: Mesh, assumptions: Assumptions, weights: Iterable[Weight]) -> None:
        self._pricing = Pricing(ComputeModel(system, assumptions), TransferModel(system, mesh, assumptions))
        self._states = STATES[assumptions.optimizer]
        self._open = dry_mesh(mesh, representatives(mesh)[0])
        self._weights = {weight.name: weight for weight in weights}
        self._buckets: dict[tuple[tuple[str, ...], str], float] = {}

    def seconds(self, single: Single, share_exposed: float) -> float:
        """Seconds of a node's steps, of the exposed share of its gradient sums, and of its update."""
        steps = math.fsum(self._pricing.script(steps, self._open.rank).seconds for steps in single.steps)
        return steps + share_exposed * self._sums(single) + self._update(single)

    def bytes(self, single: Single) -> float:
        """Bytes kept for backward, and those of the weights with their gradients and optimiser states."""
        weights = math.fsum(self._elements(name, single) * self._bytes_each(name) for name in single.sums)
        return single.bytes_kept + weights * (2 + self._states)

    def _sums(self, single: Single) -> float:
        """Seconds of its gradient sums, as parts of full buckets, which is how gradients travel."""
        return math.fsum(
            self._elements(name, single) * self._bytes_each(name) / BYTES_BUCKET * self._bucket(axes, name)
            for name, axes in single.sums.items()
            if axes
        )

    def _bucket(self, axes: tuple[str, ...], name: str) -> float:
        """Seconds of a full bucket of gradients of one type."""
        dtype = self._weights[name].dtype
        if (axes, dtype) not in self._buckets:
            shape = (BYTES_BUCKET // bytes_each(dtype),)
            weight = WeightProgram("bucket", shape, shape, dtype, True, sum_axes=axes)
            program = Program(self._open.mesh, self._open.rank, (), (weight,))
            buckets = with_sums(program, {"bucket": axes}, self._open, Summing()).buckets
            legs = (self._pricing.script(leg, self._open.rank) for bucket in buckets for leg in bucket.legs)
            self._buckets[axes, dtype] = math.fsum(leg.seconds for leg in legs)
        return self._buckets[axes, dtype]

    def _update(self, single: Single) -> float:
        weights = ((self._elements(name, single), self._weights[name].dtype) for name in single.sums)
        return self._pricing.update(weights).seconds

    def _elements(self, name: str, single: Single) -> int:
        return math.prod(local_shape(self._weights[name].shape, self._open, single.cuts.get(name, {})))

    def _bytes_each(self, name: str) -> int:
        return bytes_each(self._weights[name].dtype)
