"""The oracle's prediction for a plan on a system."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from convmesh.layout.mesh import Mesh
from convmesh.oracle.energy import Energy, energy_of
from convmesh.oracle.memory.peak import Memory, memory_of
from convmesh.oracle.prediction_summary import page, plain
from convmesh.oracle.pricing.assumptions import Assumptions
from convmesh.oracle.pricing.compute_model import shared_model
from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.pricing.stragglers import seconds_straggling
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.oracle.simulate.pipeline_clocks import CoreSharing
from convmesh.oracle.simulate.step import Scheduled, schedule
from convmesh.oracle.simulate.timeline import Timeline
from convmesh.plans.fused.fused_program import fused
from convmesh.plans.program import Program
from convmesh.system import System


@dataclass(frozen=True)
class Prediction:
    """One training step of a plan on a system.

    Time, memory, traffic and energy are each evaluated on first use: for a plan that does not fit, a search needs only
    the memory.
    """

    mesh: Mesh
    system: System
    programs: Mapping[int, Program] = field(repr=False)
    """By evaluated rank; every other rank behaves like one of these."""
    assumptions: Assumptions

    @cached_property
    def parts(self) -> Scheduled:
        """The simulated step."""
        return _scheduled(self.programs, self.system, self.assumptions)

    @cached_property
    def memory(self) -> Mapping[int, Memory]:
        """By evaluated rank."""
        device = self.system.torch_device
        return {rank: memory_of(program, self.assumptions, device=device) for rank, program in self.programs.items()}

    @cached_property
    def sent(self) -> Mapping[int, Mapping[tuple[str, ...], int]]:
        """By evaluated rank: the bytes that it sends in a step, by axes."""
        return {rank: _sent(program) for rank, program in self.programs.items()}

    @cached_property
    def energy(self) -> Energy:
        """Energy of all ranks in a step."""
        return energy_of(self.parts, self.system, self.programs, self.assumptions)

    @property
    def seconds_step(self) -> float:
        return self.parts.step.value

    @property
    def seconds(self) -> Estimate:
        """The step's time with its interval and basis."""
        return self.parts.step

    @property
    def bytes_memory(self) -> int:
        """Peak bytes of the rank that holds most."""
        return max(memory.bytes_peak for memory in self.memory.values())

    @property
    def bytes_needed(self) -> int:
        """Memory that every device must have: tensors and libraries."""
        return max(memory.bytes_needed for memory in self.memory.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes sent in a step by the rank that sends most."""
        return max(sum(by_axes.values()) for by_axes in self.sent.values())

    @property
    def joules(self) -> Estimate:
        """Joules of a step, with interval and basis."""
        return self.energy.joules

    @property
    def joules_step(self) -> float:
        return self.joules.value

    @property
    def timeline(self) -> Timeline:
        """What runs when, on the evaluated ranks."""
        return self.parts.timeline

    def to_plain(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return plain(self)

    def __str__(self) -> str:
        """A page to read."""
        return page(self)


def predict_programs(
    programs: Mapping[int, Program], system: System, assumptions: Assumptions | None = None
) -> Prediction:
    """Price the programs of a few ranks that stand for all."""
    mesh = next(iter(programs.values())).mesh
    running = {rank: fused(program) for rank, program in programs.items()}
    return Prediction(mesh, system, running, assumptions or Assumptions())


def seconds_of(programs: Mapping[int, Program], system: System, assumptions: Assumptions | None = None) -> float:
    """The step's time alone, as `predict_programs` predicts it."""
    running = {rank: fused(program) for rank, program in programs.items()}
    return _scheduled(running, system, assumptions or Assumptions()).step.value


def _scheduled(programs: Mapping[int, Program], system: System, assumed: Assumptions) -> Scheduled:
    """The simulated step, with waits for the slowest of equal ranks and for input."""
    first = next(iter(programs.values()))
    mesh, cores = first.mesh, system.node.cores
    active = min(mesh.size, assumed.ranks_per_node or int(system.node.devices))
    sharing = None
    if cores is not None and first.stages > 1:  # stages compute in turns; the simulation knows which
        sharing = CoreSharing(max(1, active // mesh.axes.get("pipe", 1)), float(cores))
        active = min(active, int(cores))
    compute = shared_model(system, assumed, active)
    parts = schedule(programs, compute, TransferModel(system, mesh, assumed), sharing)
    parts = parts.waiting(seconds_straggling(parts.compute.value, mesh.size, assumed.jitter))
    return parts.waiting(assumed.seconds_input - parts.step.value)


def _sent(program: Program) -> dict[tuple[str, ...], int]:
    sent: Counter[tuple[str, ...]] = Counter()
    for transfer, times in program.transfers_with_update():
        sent[transfer.axes] += transfer.bytes_sent * times
    return dict(sent)
