"""How the time of a step is spent, from the clocks of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.oracle.simulate.rank_clocks import Clock, Flow, ScriptPart
from convmesh.oracle.simulate.stand_ins import Crowd
from convmesh.oracle.simulate.timeline import Interval, Timeline, joined
from convmesh.plans.program import Program

NOTHING = Estimate.exactly(0.0)


@dataclass(frozen=True)
class Scheduled:
    """How the slowest rank spends the time of one step."""

    compute: Estimate
    exposed: Estimate
    """Communication that computation waits for."""
    hidden: Estimate
    """Communication that overlaps computation."""
    idle: Estimate
    """Waiting for other ranks, for stages before and after, and for input."""
    update: Estimate
    rank: int = 0
    """The slowest of the evaluated ranks."""
    intervals: Callable[[], list[list[Interval]]] = field(default=list, compare=False, repr=False)

    @property
    def step(self) -> Estimate:
        return Estimate.total((self.compute, self.exposed, self.idle, self.update))

    @cached_property
    def timeline(self) -> Timeline:
        """Built on first use."""
        return joined(self.intervals())

    def waiting(self, seconds: float) -> Scheduled:
        """The same with `seconds` more idle time."""
        return replace(self, idle=self.idle + Estimate.of(seconds, "model", 0.5)) if seconds > 0 else self


def new_flow(programs: Mapping[int, Program], transfer: TransferModel, lead: float = 0.0) -> Flow:
    """Clocks at zero; hosts may be ahead of their devices by `lead`."""
    mesh = next(iter(programs.values())).mesh
    return Flow(Crowd(mesh, programs), lost_of(transfer), lead)


def lost_of(transfer: TransferModel) -> float:
    """The share of an overlapped transfer that still lengthens a step.

    A transfer of length t takes st·t while computation runs sc times slower: st·t·(1 − 1/sc).
    """
    overlap = transfer.overlap
    slowed = overlap.transfer_slowdown * (1 - 1 / max(1.0, overlap.compute_slowdown))
    return min(1.0, max(0.0, 1 - overlap.hidden, slowed))


def spent(
    clock: Clock, parts: list[ScriptPart], update: Estimate, rank: int, intervals: Callable[[], list[list[Interval]]]
) -> Scheduled:
    """A clock's seconds, with the bounds and basis of the priced parts."""
    sent = Estimate.total(part.script.transfers for part in parts)
    return Scheduled(
        compute=Estimate.total(part.script.compute for part in parts),
        exposed=_as(clock.exposed, sent),
        hidden=_as(clock.hidden, sent),
        idle=_as(clock.idle, sent),
        update=update,
        rank=rank,
        intervals=intervals,
    )


def _as(seconds: float, priced: Estimate) -> Estimate:
    """Seconds with the relative bounds of another estimate."""
    if not seconds:
        return NOTHING
    return priced.scaled(seconds / priced.value) if priced.value else Estimate.of(seconds, "model", 0.5)
