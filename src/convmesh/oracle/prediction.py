"""What the oracle says about a plan on a system."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from convmesh.layout.mesh import Mesh
from convmesh.oracle.assumptions import Assumptions
from convmesh.oracle.compute import ComputeModel
from convmesh.oracle.energy import joules_of
from convmesh.oracle.estimate import Estimate
from convmesh.oracle.memory import Memory, memory_of
from convmesh.oracle.schedule import Scheduled, schedule
from convmesh.oracle.transfer import TransferModel
from convmesh.plan.program import Program
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
    joules: Estimate

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
    def bytes_sent(self) -> int:
        """In a step, of the rank that sends most."""
        return max(sum(by_axes.values()) for by_axes in self.sent.values())

    @property
    def joules_step(self) -> float:
        return self.joules.value


def predict_programs(
    programs: Mapping[int, Program], system: System, assumptions: Assumptions | None = None
) -> Prediction:
    """Price the programs of some ranks, which stand for all others."""
    assumed = assumptions or Assumptions()
    mesh = next(iter(programs.values())).mesh
    parts = schedule(programs, ComputeModel(system, assumed), TransferModel(system, mesh, assumed))
    return Prediction(
        mesh=mesh,
        system=system,
        parts=parts,
        memory={rank: memory_of(program, assumed) for rank, program in programs.items()},
        sent={rank: _sent(program) for rank, program in programs.items()},
        joules=joules_of(parts, system, mesh.size),
    )


def _sent(program: Program) -> dict[tuple[str, ...], int]:
    sent: Counter[tuple[str, ...]] = Counter()
    for transfer, times in program.transfers():
        sent[transfer.axes] += transfer.bytes_sent * times
    return dict(sent)
