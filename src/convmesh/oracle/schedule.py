"""When everything of a step runs: clocks of all ranks, for computation and for communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from convmesh.oracle.compute import ComputeModel
from convmesh.oracle.estimate import Estimate
from convmesh.oracle.transfer import TransferModel
from convmesh.plan.program import Program, Work


@dataclass(frozen=True, slots=True)
class Scheduled:
    """How the time of one step is spent on the rank that needs longest."""

    compute: Estimate
    exposed: Estimate
    """Communication that computation waits for."""
    hidden: Estimate
    """Communication behind computation."""
    idle: Estimate
    """Waiting for other ranks, for stages before and after, and for input."""
    update: Estimate

    @property
    def step(self) -> Estimate:
        return Estimate.total((self.compute, self.exposed, self.idle, self.update))


def schedule(programs: Mapping[int, Program], compute: ComputeModel, transfer: TransferModel) -> Scheduled:
    """Run the programs of some ranks, which stand for all others that do as they do."""
    return max((_alone(program, compute, transfer) for program in programs.values()), key=lambda s: s.step.value)


def _alone(program: Program, compute: ComputeModel, transfer: TransferModel) -> Scheduled:
    work, sent = [], []
    for phase, _, step in program.steps():
        times = 1 if phase == "reduction" else program.repeats
        if isinstance(step, Work):
            work.append(compute.work(step).scaled(times))
        else:
            sent.append(transfer.transfer(step, program.rank).scaled(times))
    nothing = Estimate.exactly(0.0)
    updates = (compute.update(w.bytes_held // 4, w.dtype) for w in program.weights if w.learns)
    return Scheduled(Estimate.total(work), Estimate.total(sent), nothing, nothing, Estimate.total(updates))
