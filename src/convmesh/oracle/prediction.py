"""What the oracle says about a plan on a system."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convmesh.layout.mesh import Mesh
from convmesh.oracle.energy import Energy, energy_of
from convmesh.oracle.memory.peak import Memory, memory_of
from convmesh.oracle.prediction_summary import page, plain
from convmesh.oracle.pricing.assumptions import Assumptions
from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.pricing.stragglers import seconds_straggling
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.oracle.simulate.pipeline_clocks import CoreSharing
from convmesh.oracle.simulate.step import Scheduled, schedule
from convmesh.oracle.simulate.timeline import Timeline
from convmesh.plans.program import Program
from convmesh.plans.steps import Transfer
from convmesh.system import System


@dataclass(frozen=True)
class Prediction:
    """One training step of a plan on a system."""

    mesh: Mesh
    system: System
    parts: Scheduled
    memory: Mapping[int, Memory]
    """By rank that was worked out; the others do as one of these."""
    sent: Mapping[int, Mapping[tuple[str, ...], int]]
    """By rank that was worked out: the bytes it sends in a step along which axes."""
    energy: Energy
    """Of all ranks in a step."""

    @property
    def seconds_step(self) -> float:
        return self.parts.step.value

    @property
    def seconds(self) -> Estimate:
        """The step's time with its interval and what it rests on."""
        return self.parts.step

    @property
    def bytes_memory(self) -> int:
        """Of the rank that holds most."""
        return max(memory.bytes_peak for memory in self.memory.values())

    @property
    def bytes_needed(self) -> int:
        """What every device must have: tensors, and what libraries take beside them."""
        return max(memory.bytes_needed for memory in self.memory.values())

    @property
    def bytes_sent(self) -> int:
        """In a step, of the rank that sends most."""
        return max(sum(by_axes.values()) for by_axes in self.sent.values())

    @property
    def joules(self) -> Estimate:
        """Of a step, with the interval and what it rests on."""
        return self.energy.joules

    @property
    def joules_step(self) -> float:
        return self.joules.value

    @property
    def timeline(self) -> Timeline:
        """When what runs, on the ranks that were worked out."""
        return self.parts.timeline

    def to_plain(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return plain(self)

    def __str__(self) -> str:
        """A page for people."""
        return page(self)


def predict_programs(
    programs: Mapping[int, Program], system: System, assumptions: Assumptions | None = None
) -> Prediction:
    """Price the programs of some ranks, which stand for all others."""
    assumed = assumptions or Assumptions()
    mesh = next(iter(programs.values())).mesh
    parts = _scheduled(programs, system, assumed)
    return Prediction(
        mesh=mesh,
        system=system,
        parts=parts,
        memory={rank: memory_of(p, assumed, device=system.torch_device) for rank, p in programs.items()},
        sent={rank: _sent(program) for rank, program in programs.items()},
        energy=energy_of(parts, system, programs, assumed),
    )


def _scheduled(programs: Mapping[int, Program], system: System, assumed: Assumptions) -> Scheduled:
    """The schedule, with waiting for the slowest of equal ranks and for input."""
    first = next(iter(programs.values()))
    mesh, cores = first.mesh, system.node.cores
    active = min(mesh.size, assumed.ranks_per_node or int(system.node.devices))
    sharing = None
    if cores is not None and first.stages > 1:  # stages do not all compute at once: who does is found out on the way
        sharing = CoreSharing(max(1, active // mesh.axes.get("pipe", 1)), float(cores))
        active = min(active, int(cores))
    compute = ComputeModel(system, assumed, active=active)
    parts = schedule(programs, compute, TransferModel(system, mesh, assumed), sharing)
    parts = parts.waiting(seconds_straggling(parts.compute.value, mesh.size, assumed.jitter))
    return parts.waiting(assumed.seconds_input - parts.step.value)


def _sent(program: Program) -> dict[tuple[str, ...], int]:
    """With what follows the optimiser's step."""
    sent: Counter[tuple[str, ...]] = Counter()
    for transfer, times in program.transfers():
        sent[transfer.axes] += transfer.bytes_sent * times
    for shown in program.shown:
        for step in (*shown.start, *shown.finish):
            if isinstance(step, Transfer):
                sent[step.axes] += step.bytes_sent
    return dict(sent)
