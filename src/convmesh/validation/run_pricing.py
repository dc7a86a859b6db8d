"""Seconds of one run's step: the oracle's models, calibrated, with the habits of the code that ran."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from convmesh.layout.mesh import SPACE_AXES, Mesh
from convmesh.oracle.pricing.assumptions import Assumptions
from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.pricing.stragglers import seconds_straggling
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.oracle.simulate.step import schedule
from convmesh.plans.program import Program
from convmesh.plans.steps import Transfer, Work
from convmesh.system import LinkLevel, System
from convmesh.validation.anchors import Calibration
from convmesh.validation.code_habits import Practice
from convmesh.validation.measured_run import MeasuredRun

REDUCES = ("all_reduce",)
"""Carriers that use NCCL even where a code sends everything else through the host: gradient sums."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run and all that its price depends on."""

    run: MeasuredRun
    system: System
    practice: Practice
    programs: Mapping[int, Program]
    bytes_input: int
    """Bytes of one sample."""

    @property
    def mesh(self) -> Mesh:
        return next(iter(self.programs.values())).mesh

    @property
    def assumptions(self) -> Assumptions:
        devices = int(self.system.node.devices)
        per_node = None if self.run.gpus_per_node is None else min(self.run.gpus_per_node, devices)
        return Assumptions(optimizer=self.practice.optimizer, tf32=self.run.tf32, ranks_per_node=per_node)


@dataclass(frozen=True, slots=True)
class PricedRun:
    """The parts of a step's seconds."""

    compute: float
    """Work and update, calibrated."""
    waiting: float
    """Exposed transfers, waits for other ranks, and distribution of input."""
    overhead: float

    @property
    def step(self) -> float:
        return self.compute + self.waiting + self.overhead


class CalibratedCompute(ComputeModel):
    """A device that differs from its figures by a constant factor."""

    def __init__(self, system: System, assumptions: Assumptions, factor: float) -> None:
        super().__init__(system, assumptions)
        self._factor = factor

    def priced(self, work: Work, compiled: bool = False) -> tuple[Estimate, float]:
        seconds, host = super().priced(work, compiled)
        return seconds.scaled(self._factor), host


class PractisedTransfers(TransferModel):
    """Links as a code uses them: directly, or through host memory."""

    def __init__(self, case: Case, factor: float) -> None:
        practice = case.practice
        super().__init__(_with_network(case.system, practice.fraction_network), case.mesh, case.assumptions)
        reducing = _with_network(case.system, practice.fraction_network * practice.fraction_reduction)
        self._reducing = TransferModel(reducing, case.mesh, case.assumptions)
        self._staged = case.run.kind in practice.staged
        self._bandwidth_staged = practice.bytes_per_second_staged
        self._hops = case.mesh.extent(SPACE_AXES) - 1 if practice.chained else 1
        self._factor = factor

    def transfer(self, transfer: Transfer, rank: int) -> Estimate:
        if transfer.carrier in REDUCES and "data" in transfer.axes:
            return self._reducing.transfer(transfer, rank).scaled(self._factor)
        direct = super().transfer(transfer, rank).scaled(self._factor)
        return self._through_host(transfer, direct) if self._staged else direct

    def _through_host(self, transfer: Transfer, direct: Estimate) -> Estimate:
        hops = 1 if transfer.peer is None else self._hops
        staged = hops * transfer.bytes_sent / self._bandwidth_staged * self._factor
        return Estimate.of(max(direct.value, staged), "guess", 0.5)


def _with_network(system: System, fraction: float) -> System:
    """The system with a fraction of its network bandwidth."""
    if fraction == 1.0:
        return system
    links = (_slower(level, fraction) if level.medium == "network" else level for level in system.links)
    return replace(system, links=tuple(links))


def _slower(level: LinkLevel, fraction: float) -> LinkLevel:
    figure = level.bytes_per_second
    return replace(level, bytes_per_second=replace(figure, value=figure.value * fraction))


def price(case: Case, calibration: Calibration) -> PricedRun:
    """The parts of a step."""
    compute = CalibratedCompute(case.system, case.assumptions, calibration.compute)
    transfers = PractisedTransfers(case, calibration.transfer)
    if case.practice.overlaps or "pipeline" in case.run.strategy:
        parts = schedule(case.programs, compute, transfers)
        worked, waited = parts.compute.value + parts.update.value, parts.exposed.value + parts.idle.value
    else:
        worked, waited = max((_in_turn(program, compute, transfers) for program in case.programs.values()), key=sum)
    waited += seconds_straggling(worked, case.run.gpus, case.practice.jitter) + _input(case)
    return PricedRun(worked, waited, calibration.seconds_overhead)


def _in_turn(program: Program, compute: ComputeModel, transfers: TransferModel) -> tuple[float, float]:
    """Seconds of work and of transfers for a code without overlap."""
    worked = sum(compute.update(weight.elements, weight.dtype).value for weight in program.weights if weight.learns)
    waited = 0.0
    for phase, _, step in program.steps():
        times = 1 if phase == "reduction" else program.repeats
        if isinstance(step, Work):
            worked += compute.work(step).value * times
        elif isinstance(step, Transfer):
            waited += transfers.transfer(step, program.rank).value * times
    return worked, waited


def _input(case: Case) -> float:
    """Seconds that a step waits for its batch, beyond what prefetching hides."""
    groups = case.run.strategy.get("data", 1)
    bytes_group, ranks = case.bytes_input * case.run.batch / groups, case.run.gpus // groups
    copied = bytes_group / case.practice.bytes_per_second_paged if case.practice.copies_input else 0.0
    if not case.practice.hands_out_input or "pipeline" in case.run.strategy:
        return copied
    # Along a tree of processes, through host memory.
    return copied + math.ceil(math.log2(ranks)) * bytes_group / case.practice.bytes_per_second_copied
