"""Measures this machine into a system: its device, its links, and the operators of some networks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from convmesh.measure.device_figures import Progress, measure_device, silent
from convmesh.measure.growing import Growing
from convmesh.measure.local_system import local_system, with_links
from convmesh.measure.machine import Machine, this_machine
from convmesh.measure.operator_times import Repeats, distinct_works
from convmesh.measure.overheads import KINDS, measure_overheads
from convmesh.measure.power import with_power
from convmesh.measure.sending import measure_sending
from convmesh.measure.store import Store
from convmesh.measure.transfer_times import Effort, measure_between_gpus, measure_transfers
from convmesh.measure.updates import measure_updates, measure_updates_at_once
from convmesh.measure.workloads import Workload
from convmesh.plans import Program
from convmesh.system import System
from convmesh.system.operator_table import OperatorTable, Overheads, UpdateTiming
from convmesh.system.transfer_table import TransferTable
from convmesh.testing import run_ranks

MODELS = ("resnet50", "vgg16", "cosmoflow", "unet3d")
"""Networks whose operators are timed by default."""

LEAST_SECONDS = 5.0
"""Least time for operators, however long the rest took."""

SECONDS_TIMEOUT = 200.0
"""Timeout for measurements that take ten seconds on an idle machine."""

RANKS = (1, 2, 4)
"""Rank counts whose shard shapes are timed by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Time limits of a calibration: operators are timed until about five minutes after the start."""

    seconds: float = 285.0
    seconds_transfers: float = 60.0
    repeats: Repeats = field(default_factory=Repeats)
    quick: bool = False

    @classmethod
    def short(cls) -> Budget:
        """A smoke test: figures are rough, and most transfers are left to formulas."""
        return cls(seconds=15.0, seconds_transfers=1.0, repeats=Repeats(seconds_round=1e-3, most=3), quick=True)

    def effort(self, ranks: Sequence[int]) -> Effort:
        groups = tuple(n for n in ranks if n > 1) or (2,)
        if self.quick:
            return Effort(
                ranks=groups[:1], carriers=("all_reduce", "neighbour"), factor=1024, seconds=self.seconds_transfers
            )
        return Effort(ranks=groups, seconds=self.seconds_transfers)


def calibrate(
    workloads: Sequence[Workload | str] | None = None,
    ranks: Sequence[int] = RANKS,
    *,
    programs: Sequence[Program] = (),
    output: Path | str | None = None,
    budget: Budget | None = None,
    progress: Progress = silent,
) -> System:
    """Measure this machine and save it as the system `local`, or to `output`.

    Times the operators of `workloads` under all strategies for each count in `ranks`, and of further `programs`.
    Results are saved as they come: rerunning after an interruption, or with other networks, extends the last result.
    """
    machine, limits = this_machine(), budget or Budget()
    store = Store.at(None if output is None else Path(output), machine, rough=limits.quick)
    run = _Calibration(machine, store, limits, progress)
    return run.system(_workloads(workloads, machine), tuple(ranks), programs)


def _workloads(given: Sequence[Workload | str] | None, machine: Machine) -> list[Workload]:
    """Names stand for reference networks: as published on a GPU, narrow with small samples on a CPU."""
    chosen = MODELS if given is None else given
    return [Workload.reference(w, small=not machine.gpus) if isinstance(w, str) else w for w in chosen]


@dataclass(frozen=True, slots=True)
class _Calibration:
    machine: Machine
    store: Store
    budget: Budget
    progress: Progress
    begun: float = field(default_factory=time.monotonic)

    def system(self, workloads: Sequence[Workload], ranks: tuple[int, ...], programs: Sequence[Program]) -> System:
        """Measure device, links and operators, saving each as soon as it is done."""
        device = measure_device(self.machine, self.budget.quick, self.progress)
        system = local_system(self.machine, device)
        system = replace(system, power=with_power(system.power, self.machine))
        system = self.store.keep(self._with_earlier(system))
        system = self._with_transfers(system, ranks)
        listed = [*programs, *self._lowered(workloads, ranks)]
        return self._with_operators(system, listed, ranks)

    def _with_earlier(self, system: System) -> System:
        """Add the tables of earlier calibrations of the same device."""
        table, transfers = self.store.operators(self.machine), self.store.transfers()
        system = with_links(system, transfers) if transfers else system
        return replace(system, operators=table) if table.timings else system

    def _with_transfers(self, system: System, ranks: tuple[int, ...]) -> System:
        if self.machine.gpus > 1:
            self.progress(f"transfers between {self.machine.gpus} GPUs")
            table = measure_between_gpus(self.machine.gpus, self.budget.seconds_transfers)
            return self.store.keep(with_links(system, table))
        if self.machine.gpus:
            self.progress("only one GPU: guessing its links from the most similar system")
            return system
        effort = self.budget.effort(ranks)
        if system.transfers is not None and _covers(system.transfers, effort):
            return system
        self.progress(f"transfers between {', '.join(map(str, effort.ranks))} ranks")
        return self.store.keep(with_links(system, measure_transfers(effort)))

    def _lowered(self, workloads: Sequence[Workload], ranks: tuple[int, ...]) -> list[Program]:
        programs: list[Program] = []
        for workload in workloads:
            self.progress(f"operators of {workload.name} on {', '.join(map(str, ranks))} ranks")
            programs += workload.programs(ranks, self.machine.device.type)
        return programs

    def _with_operators(self, system: System, programs: Sequence[Program], ranks: tuple[int, ...]) -> System:
        works, base = distinct_works(programs), system

        def keep(table: OperatorTable) -> None:
            nonlocal system
            system = self.store.keep(replace(base, operators=table))

        growing = Growing(
            device=self.machine.device,
            repeats=self.budget.repeats,
            keep=keep,
            progress=self.progress,
        )
        levels = self._levels(ranks)
        table = self._with_overheads(system.operators or OperatorTable(self.machine.kind, ()))
        table = self._with_updates(table, levels)
        keep(table)
        for number, active in enumerate(levels):
            left = self.begun + self.budget.seconds - time.monotonic()
            seconds = max(LEAST_SECONDS, left / (len(levels) - number))
            table = growing.extended(table, works, active, seconds)
        return system

    def _with_overheads(self, table: OperatorTable) -> OperatorTable:
        """Add optimiser times and the runtime's own overhead, measured on one rank."""
        if self.budget.quick and table.updates:
            return table
        self.progress("optimisers and runtime overhead")
        args = self.machine.device, self.budget.quick
        forked = partial(run_ranks, seconds_timeout=SECONDS_TIMEOUT)
        alone = _in_a_job_of_one if self.machine.gpus else forked  # a process that has used a GPU cannot fork
        updates, overheads = alone(1, _updates_and_overheads, *args)[0]
        if not self.machine.gpus and "batchnorm" in overheads.kinds:
            overheads = forked(2, measure_sending, overheads)[0]
        about = {"machine": self.machine.kind, "torch": torch.__version__, "date": date.today().isoformat()}
        return replace(table, updates={**table.updates, **updates}, overheads=overheads, about=about)

    def _with_updates(self, table: OperatorTable, levels: Sequence[int]) -> OperatorTable:
        """Add optimiser times for several ranks at once, which share memory; a quick run reuses earlier ones."""
        already_timed = {timing.active for timing in table.updates.values()} if self.budget.quick else set()
        updates = dict(table.updates)
        for active in (level for level in levels if level > 1 and level not in already_timed):
            self.progress(f"optimisers, {active} ranks at once")
            updates |= measure_updates_at_once(active, SECONDS_TIMEOUT)
        return replace(table, updates=updates)

    def _levels(self, ranks: tuple[int, ...]) -> list[int]:
        """Numbers of ranks that compute at once on a CPU; ranks beyond its cores take turns, which needs no timing."""
        if self.machine.gpus:
            return [1]
        return sorted({min(count, self.machine.cores) for count in ranks})


def _covers(table: TransferTable, effort: Effort) -> bool:
    """Whether the table has all carriers and groups of `effort`."""
    wanted = {(c, n, active) for active in effort.ranks for c in effort.carriers for n in effort.groups(active, c)}
    return wanted <= {(curve.carrier, curve.ranks, curve.active) for curve in table.curves}


def _updates_and_overheads(device: torch.device, quick: bool) -> tuple[dict[str, UpdateTiming], Overheads]:
    kinds = dict(list(KINDS.items())[:1]) if quick else KINDS
    return measure_updates(device), measure_overheads(device, kinds)


def _in_a_job_of_one(ranks: int, call: Callable[..., Any], *args: Any) -> list[Any]:
    """Run in this process, as the only rank of a job."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=ranks)
    try:
        return [call(*args)]
    finally:
        dist.destroy_process_group()
