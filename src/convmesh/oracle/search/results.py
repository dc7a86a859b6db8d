"""The result of a search: plans, best first, and why the others are not among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from convmesh.layout import Mesh
from convmesh.oracle.prediction import Prediction
from convmesh.oracle.search.objectives import Objective
from convmesh.oracle.search.refusal import Refusal
from convmesh.plans import Plan

ALIKE = 1e-3
"""Relative difference in time, memory and traffic below which plans count as the same."""


@dataclass(frozen=True)
class Ranked:
    """A plan that fits, and its prediction."""

    plan: Plan
    prediction: Prediction

    @property
    def strategy(self) -> str:
        return self.plan.strategy

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    def is_like(self, other: Ranked) -> bool:
        """Whether two plans do the same under other names of axes: `height` may cut samples as `data` does."""
        mine, theirs = self.prediction, other.prediction
        names = ("seconds_step", "bytes_memory", "bytes_sent")
        return all(math.isclose(getattr(mine, name), getattr(theirs, name), rel_tol=ALIKE) for name in names)


@dataclass(frozen=True)
class Rejected:
    """A strategy on a mesh that is not among the plans, and why."""

    strategy: str
    mesh: Mesh
    refusal: Refusal

    @property
    def reason(self) -> str:
        return str(self.refusal)

    def __str__(self) -> str:
        where = f"{self.strategy} on {self.mesh}" if self.mesh.size > 1 else "one device"
        return f"{where}: {self.reason}"


@dataclass(frozen=True)
class SearchResult:
    """`plans` best first by `objective`; `seconds_alone` is the step's time on one device with enough memory."""

    plans: tuple[Ranked, ...]
    rejected: tuple[Rejected, ...]
    objective: Objective
    seconds_alone: float

    @property
    def best(self) -> Ranked:
        return self.plans[0]

    @property
    def pareto(self) -> tuple[Ranked, ...]:
        """Plans that no other beats in time, memory and energy at once, fastest first."""
        return pareto(self.plans)

    def efficiency(self, ranked: Ranked) -> float:
        """The time of one device over the time of all devices together."""
        return self.seconds_alone / (ranked.mesh.size * ranked.prediction.seconds_step)


def pareto(plans: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """Plans that no other beats in time, memory and energy at once, fastest first."""
    costs = [(r.prediction.seconds_step, r.prediction.bytes_memory, r.prediction.joules_step) for r in plans]
    beaten = [any(_beats(other, mine) for other in costs) for mine in costs]
    kept = [ranked for ranked, out in zip(plans, beaten, strict=True) if not out]
    return tuple(sorted(kept, key=lambda ranked: ranked.prediction.seconds_step))


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
