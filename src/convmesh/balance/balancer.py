"""Keeps ranks equally busy: measures them while a network trains, and moves samples and space to the faster ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from convmesh.balance.busy_meter import BusyMeter
from convmesh.balance.fair_shares import MEASURED, Dealing, MovePolicy, next_dealing
from convmesh.balance.move_patience import MovePatience
from convmesh.dist import OpenMesh, all_reduce
from convmesh.dist.stamps import clock_for
from convmesh.errors import ConfigError, ConvMeshError
from convmesh.layout.mesh import SHARED_AXES
from convmesh.runtime import ParallelNet

SETTLING = 3
"""Steps that are not measured after a start or a move: they choose kernels and allocate memory."""


AGAIN = 2
"""Steps to the next decision if the last step alone would have moved shares."""


@dataclass(frozen=True)
class Move:
    """What a decision was based on, and what it changed."""

    step: int
    """Steps done by the balancer when it was made."""
    seconds: tuple[float, ...]
    """How long each rank was busy in a step."""
    before: dict[str, tuple[int, ...]]
    after: dict[str, tuple[int, ...]]
    refused: str = ""
    """Why the network cannot be cut this way, in which case nothing moved."""

    @property
    def text(self) -> str:
        """For a log."""
        busy = f"ranks were busy for {', '.join(f'{s * 1e3:.3g}' for s in self.seconds)} ms a step"
        shares = ", ".join(f"{axis} {_listed(self.before[axis])} -> {_listed(self.after[axis])}" for axis in self.after)
        return f"{busy}; shares: {shares}" + (f"; refused: {self.refused}" if self.refused else "")


class Balancer:
    """Deals the samples of a batch, and space, to ranks by their measured speed.

    Make it on every rank and train in `with balancer.step():`. Every `every` steps the ranks tell each other how long
    they were busy, not counting waits for others, and all take the same decision. The loss, the gradients and the order
    of the samples stay those of equal shares.
    """

    def __init__(self, net: ParallelNet, every: int = 5, policy: MovePolicy | None = None) -> None:
        if every < MEASURED:
            raise ConfigError(f"`every` (={every}) must be at least {MEASURED}, the steps that are measured.")
        if net.plan.pipeline is not None:
            raise ConfigError("`balance` needs a plan without a pipeline: stages have micro-batches of equal size.")
        self.net, self.every, self.policy = net, every, policy or MovePolicy()
        self.extents = extents_of(net)
        """The extents of the dims that are dealt, by axis; empty if there is nothing to move."""
        self.moves: list[Move] = []
        self._meter = BusyMeter(clock_for(net.mesh.device))
        self._steps = 0
        self._settled = -SETTLING
        self._earlier: list[float] | None = None
        self._kept: list[float] = []
        """The seconds of the previous step, if the next decision is to count it."""
        self._patience = MovePatience()

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """The current shares of the ranks of each axis, in units of its extent."""
        return dict(Dealing.of(self.net.mesh.mesh, self.extents).units)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wraps a training step, and the reading of its batch if that is to count."""
        if not self.extents:
            yield
            return
        is_measured = self._settled >= (self.every - MEASURED) * self._patience.factor
        if is_measured:
            self._meter.begin()
        try:
            yield
        except BaseException:
            self._meter.drop()
            raise
        self._meter.end()
        self._after_step()

    def _after_step(self) -> None:
        self._steps += 1
        if self.net.dealt_mesh != self.net.mesh.mesh:  # read ahead, before shares moved
            self._meter.drop()
            return
        self._settled += 1
        if self._settled >= self.every * self._patience.factor:
            self._decide()

    def _decide(self) -> None:
        """All ranks come here after the same step, and end up with the same numbers."""
        busy = [*self._kept, *self._meter.taken()]
        # The median: a single hiccup does not count, but a rank that is held up repeatedly shows.
        seconds, last = told_to_all([statistics.median(busy), busy[-1]], self.net.mesh)
        now = Dealing.of(self.net.mesh.mesh, self.extents)
        then = next_dealing(now, seconds, self._earlier, self.policy)
        self._earlier = seconds if then is None else None
        self._kept, self._settled = [], 0
        if then is not None:
            self._patience.moved(now, then)
            self._move(now, then, seconds)
            return
        self._patience.stayed()
        if self._patience.factor == 1 and next_dealing(now, last, policy=self.policy) is not None:
            # A hiccup, or a rank that has become slow: measure two more steps, for a slow rank costs more than a look.
            self._kept, self._settled = busy[-1:], self.every - AGAIN

    def _move(self, now: Dealing, then: Dealing, seconds: Sequence[float]) -> None:
        changed = {axis: units for axis, units in then.units.items() if units != now.units[axis]}
        refused = ""
        try:
            self.net.set_shares(**changed)
        except ConvMeshError as error:
            refused = str(error)
            self.extents = {axis: extent for axis, extent in self.extents.items() if axis not in changed}
        before = {axis: now.units[axis] for axis in changed}
        self.moves.append(Move(self._steps, tuple(seconds), before, changed, refused))
        self._settled = -SETTLING


def extents_of(net: ParallelNet) -> dict[str, int]:
    """The extents of the input's dims that are cut by axes with possibly uneven shares."""
    first = net.input_layouts()[0]
    cuts = ((cut.partition.extent, axis) for cut in first.cuts for axis in cut.axes)
    return {axis: extent for extent, axis in cuts if axis in SHARED_AXES and extent > first.mesh.axes[axis]}


def told_to_all(numbers: Sequence[float], mesh: OpenMesh) -> list[list[float]]:
    """Every rank's numbers, on every rank: for each number, a list over the ranks."""
    table = torch.zeros(len(numbers), mesh.mesh.size, dtype=torch.float64)
    table[:, mesh.rank] = torch.tensor(numbers, dtype=torch.float64)
    told: list[list[float]] = all_reduce(table.to(mesh.device), mesh, tuple(mesh.mesh.axes)).tolist()
    return told


def _listed(units: Sequence[int]) -> str:
    return ":".join(map(str, units))
