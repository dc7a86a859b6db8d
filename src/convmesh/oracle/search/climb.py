"""The best mesh of a strategy: start at one that sends little, and move to better neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from convmesh.layout import Mesh
from convmesh.oracle.search.candidates import Candidate, unevenness
from convmesh.oracle.search.results import Ranked

SIMILAR = 0.25
"""Meshes that cut equally finely hold about the same memory: they differ by less than this."""

CLEARLY = 1.02
"""Ratio of the costs of two meshes above which the next one in that direction is taken to cost yet more."""


@dataclass(frozen=True)
class PlanOrder:
    """How far a plan exceeds the memory, then its cost: less is better."""

    beyond: float
    cost_of: Callable[[], float]
    """Called only where it decides: a cost takes a simulation."""

    @property
    def cost(self) -> float:
        return self.cost_of()

    def __lt__(self, other: PlanOrder) -> bool:
        return self.cost < other.cost if self.beyond == other.beyond else self.beyond < other.beyond


Evaluate = Callable[[Candidate], Ranked | None]


@dataclass
class Climb:
    """Evaluates a few of a strategy's meshes; `tried` holds them all, None where there is no plan."""

    candidates: Sequence[Candidate]
    shape: Sequence[int]
    evaluate: Evaluate
    key: Callable[[Ranked], PlanOrder]
    most: int
    promising: float = math.inf
    """Cost of the first mesh that fits, above which no other mesh is evaluated."""
    others: Sequence[Ranked] = ()
    """Plans of other strategies that fit."""
    tried: dict[Candidate, Ranked | None] = field(default_factory=dict)

    def run(self) -> None:
        """Start at the mesh with the most even shares and the most ranks on samples."""
        waiting = sorted(self.candidates, key=self._promise)
        here = self._first(waiting)
        if here is not None and self.key(here).beyond <= 0 and self.key(here).cost > self.promising:
            return
        while here is not None and len(self.tried) < self.most:
            here = self._step(here)

    def _promise(self, candidate: Candidate) -> tuple[float, ...]:
        """Less is better: uneven shares, then ranks that do not cut samples, then thin shards."""
        mesh = candidate.mesh
        others = [extent for name, extent in mesh.axes.items() if name != "data"]
        return unevenness(mesh, self.shape), math.prod(others), sum(others)

    def _first(self, waiting: list[Candidate]) -> Ranked | None:
        """The first mesh that fits, or the nearest: a mesh that exceeds the memory says how much finer to cut."""
        best: Ranked | None = None
        finer = 1.0
        for candidate in waiting:
            if len(self.tried) >= self.most:
                break
            if _cut_besides_samples(candidate.mesh) < finer:
                continue
            ranked = self._try(candidate)
            if ranked is None:
                continue
            beyond = self.key(ranked).beyond
            if best is not None and beyond > self.key(best).beyond:  # a finer cut held more, so the next one will
                break
            best = ranked
            if beyond <= 0:
                break
            finer = _cut_besides_samples(candidate.mesh) * max(2.0, 1 + beyond)
        return best

    def _step(self, here: Ranked) -> Ranked | None:
        """Move to a better neighbour, if there is one."""
        for candidate in sorted(self._neighbours(here), key=self._promise):
            if len(self.tried) >= self.most:
                break
            ranked = self._try(candidate)
            if ranked is not None and self.key(ranked) < self.key(here):
                return ranked
        return None

    def _neighbours(self, here: Ranked) -> list[Candidate]:
        """Those that were not tried and may be better."""
        near = [c for c in self.candidates if c not in self.tried and _are_near(c.mesh, here.mesh)]
        fineness = _cut_besides_samples(here.mesh)
        beyond = self.key(here).beyond
        if beyond > SIMILAR:  # only another fineness can fit
            return [c for c in near if _cut_besides_samples(c.mesh) != fineness]
        if beyond <= 0 and self._is_past_the_best_fineness(here):
            return [c for c in near if _cut_besides_samples(c.mesh) <= fineness]
        return near

    def _is_past_the_best_fineness(self, here: Ranked) -> bool:
        """Whether a coarser neighbour of another strategy is clearly faster, so that finer ones lead uphill."""
        fineness, cost = _cut_besides_samples(here.mesh), self.key(here).cost
        coarser = (o for o in self.others if _cut_besides_samples(o.mesh) < fineness and _are_near(o.mesh, here.mesh))
        return any(self.key(other).cost * CLEARLY < cost for other in coarser)

    def _try(self, candidate: Candidate) -> Ranked | None:
        if candidate not in self.tried:
            self.tried[candidate] = self.evaluate(candidate)
        return self.tried[candidate]


def _cut_besides_samples(mesh: Mesh) -> int:
    return mesh.size // mesh.axes.get("data", 1)


def _are_near(one: Mesh, other: Mesh) -> bool:
    """Whether the meshes differ by one prime factor moved from one axis to another."""
    names = [name for name in {*one.axes, *other.axes} if one.axes.get(name, 1) != other.axes.get(name, 1)]
    if len(names) != 2:
        return False
    a, b = one.axes.get(names[0], 1), other.axes.get(names[0], 1)
    factor, rest = divmod(max(a, b), min(a, b))
    return rest == 0 and all(factor % n for n in range(2, math.isqrt(factor) + 1))
