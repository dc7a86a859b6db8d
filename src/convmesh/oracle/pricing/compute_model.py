"""Seconds of a program's computations on a device, and of launching them from its host."""

from __future__ import annotations

import statistics

from convmesh.oracle.pricing.assumptions import STATES, Assumptions
from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.pricing.interpolation import Interpolation, Near
from convmesh.oracle.pricing.roofline import Roofline
from convmesh.plans.steps import Work
from convmesh.system import System
from convmesh.system.operator_table import OperatorTable, Overheads, Timing, UpdateTiming, tuned_call

SPREAD_MODEL = 0.5
"""Relative error of a price from a device's figures alone."""


class ComputeModel:
    """Prices local work on a system's device: as timed, from the nearest timed shapes, or from the device's figures.

    `active` ranks of a host compute at once. Each GPU has its own rank; on a processor, ranks share memory bandwidth,
    and beyond one rank for each core they take turns.
    """

    def __init__(self, system: System, assumptions: Assumptions | None = None, *, active: int = 1) -> None:
        self._assumed = assumptions or Assumptions()
        self._roofline = Roofline(system.device, self._assumed)
        self._table: OperatorTable | None = system.operators
        self._interpolation = None if self._table is None else Interpolation(self._table, self._roofline)
        self._level, self._turns = _level(self._table, active, _cores(system))
        self._active = active
        self._prices: dict[tuple[Work, bool], tuple[Estimate, float]] = {}
        self._seen: dict[tuple[int, bool], tuple[Work, tuple[Estimate, float]]] = {}
        self._contention: dict[str, float] = {}
        self._updates: dict[tuple[int, str], Estimate] = {}

    def work(self, work: Work) -> Estimate:
        """Seconds of one operator at its local shapes."""
        return self.priced(work)[0]

    def host(self, work: Work) -> float:
        """Seconds of the host to launch it; 0 where the host itself computes."""
        return self.priced(work)[1]

    def priced(self, work: Work, compiled: bool = False) -> tuple[Estimate, float]:
        """Both, looked up by id: programs mostly share the objects of equal work, and comparing these takes longer.

        A compiled step uses our own kernels where these were timed.
        """
        seen = self._seen.get((id(work), compiled))
        if seen is None:  # keep the work, so that no other gets its id
            seen = self._seen[id(work), compiled] = work, self._of_equal(work, compiled)
        return seen[1]

    @property
    def overheads(self) -> Overheads:
        """The host's seconds for each node and step, apart from launching operators."""
        return Overheads() if self._table is None else self._table.overheads

    @property
    def turns(self) -> float:
        """Slowdown from more active ranks than cores."""
        return self._turns

    @property
    def works_beside_host(self) -> bool:
        """Whether a host launches operators and runs ahead of its device."""
        return self._table is not None and any(timing.seconds_host for timing in self._table.timings[:50])

    def update(self, elements: int, dtype: str) -> Estimate:
        """Seconds of the optimiser for a tensor of `elements` parameters."""
        if (elements, dtype) not in self._updates:
            self._updates[elements, dtype] = self._updating(elements, dtype)
        return self._updates[elements, dtype]

    def _updating(self, elements: int, dtype: str) -> Estimate:
        timing = self._update(dtype)
        if timing is None:
            seconds = self._roofline.update(elements, dtype, STATES[self._assumed.optimizer])
            return Estimate.of(seconds * self._turns, "model", SPREAD_MODEL)
        seconds = timing.seconds_tensor + elements * timing.seconds_element
        return Estimate.of(seconds * self._turns, "measured", 0.1)

    def host_update(self, dtype: str) -> float:
        """Seconds of the host for one tensor of the optimiser's step."""
        timing = self._update(dtype)
        return 0.0 if timing is None else timing.seconds_host_tensor

    def _update(self, dtype: str) -> UpdateTiming | None:
        return None if self._table is None else self._table.update(self._assumed.optimizer, dtype, self._level)

    def _of_equal(self, work: Work, compiled: bool) -> tuple[Estimate, float]:
        if (work, compiled) not in self._prices:
            self._prices[work, compiled] = self._price(work, compiled)
        return self._prices[work, compiled]

    def _price(self, work: Work, compiled: bool) -> tuple[Estimate, float]:
        if self._table is None or self._interpolation is None:
            return Estimate.of(self._roofline.seconds(work) * self._turns, "model", SPREAD_MODEL), 0.0
        if compiled and (own := self._table.find(tuned_call(work.call), self._level)):
            return self._measured(own, 1.0)
        if timing := self._table.find(work.call, self._level) or self._table.find(work.call, self._active):
            return self._measured(timing, 1.0)
        if timing := self._table.find(work.call, 1):
            return self._measured(timing, self._slowdown(work.op))
        near = self._interpolation.near(work, self._level) or self._interpolation.near(work, self._active)
        if near is None:
            return Estimate.of(self._roofline.seconds(work) * self._turns, "model", SPREAD_MODEL), 0.0
        return self._interpolated(near)

    def _measured(self, timing: Timing, slowdown: float) -> tuple[Estimate, float]:
        spread = min(0.9, max(0.02, timing.spread))
        return Estimate.of(timing.seconds * slowdown * self._turns, "measured", spread), timing.seconds_host

    def _interpolated(self, near: Near) -> tuple[Estimate, float]:
        return Estimate.of(near.seconds * self._turns, "interpolated", near.spread), near.seconds_host

    def _slowdown(self, op: str) -> float:
        """Slowdown of an operator at this level of activity, from calls timed at both levels."""
        if op not in self._contention:
            assert self._table is not None
            pairs = ((t, self._table.find(t.call, 1)) for t in self._table.timings if t.active == self._level)
            ratios = [t.seconds / alone.seconds for t, alone in pairs if alone is not None and op in ("", t.op)]
            typical = statistics.median(ratios) if ratios else None
            self._contention[op] = typical if typical is not None else (self._slowdown("") if op else 1.0)
        return self._contention[op]


MOST_SHARED = 4
"""Models kept, each with all prices that it was asked for."""

_shared: list[tuple[System, Assumptions, int, ComputeModel]] = []


def shared_model(system: System, assumptions: Assumptions, active: int) -> ComputeModel:
    """A cached model for exactly this device: the plans of a search have most of their work in common."""
    for known, assumed, ranks, model in _shared:
        alike = known.device is system.device and known.node is system.node and known.operators is system.operators
        if alike and assumed == assumptions and ranks == active:
            return model
    model = ComputeModel(system, assumptions, active=active)
    _shared.append((system, assumptions, active, model))
    del _shared[:-MOST_SHARED]
    return model


def _cores(system: System) -> int | None:
    """Cores that the ranks of a host share; None where each rank has a device of its own."""
    cores = getattr(system.node, "cores", None)
    return None if cores is None else int(cores)


def _level(table: OperatorTable | None, active: int, cores: int | None) -> tuple[int, float]:
    """The number of active ranks to look up, and the slowdown from taking turns."""
    turns = 1.0 if cores is None else max(1.0, active / cores)
    at_once = 1 if cores is None else min(active, cores)
    levels = (1,) if table is None or not table.levels else table.levels
    return min(levels, key=lambda level: (abs(level - at_once), level)), turns
