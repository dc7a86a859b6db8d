"""The search: strategies on meshes, each refused or evaluated, then mixes on the best meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from convmesh.errors import ConvMeshError, InfeasibleError
from convmesh.layout import Mesh
from convmesh.oracle.search.candidates import Candidate, Candidates
from convmesh.oracle.search.climb import Climb, PlanOrder
from convmesh.oracle.search.objectives import Objective
from convmesh.oracle.search.refusal import Refusal, RefusalKind
from convmesh.oracle.search.results import Ranked, Rejected, SearchResult
from convmesh.plans import STRATEGIES

Evaluate = Callable[[Candidate], Sequence[Ranked]]
"""Evaluates a candidate: plans with predictions, as it is and, if that does not fit, in variants that hold less."""

Mix = Callable[[Mesh], Sequence[Ranked]]
"""Plans for a mesh whose layers are split differently."""


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Memory that plans must fit in, and how much is evaluated."""

    bytes_memory: float
    most_meshes: int = 5
    """Meshes to evaluate for each strategy."""
    hope: float = 1.3
    """Cost of a strategy's first mesh, over the best so far, above which its other meshes are not evaluated.

    Nor are layers mixed on a mesh whose best preset costs more."""
    mixes: int = 2
    """Meshes on which layers are mixed."""


@dataclass
class Search:
    """One run of the search."""

    candidates: Candidates
    objective: Objective
    limits: SearchLimits
    evaluate: Evaluate
    mix: Mix | None = None
    progress: Callable[[str], None] = lambda _: None
    plans: list[Ranked] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    def run(self, ranks: int, strategies: Sequence[str] = STRATEGIES) -> None:
        """Evaluate all strategies on `ranks` ranks; on one rank they are the same."""
        for strategy in strategies if ranks > 1 else strategies[:1]:
            self.progress(f"{strategy} on {ranks} ranks" if ranks > 1 else "one device")
            self._strategy(strategy, ranks)
        if self.mix is not None:
            self._mixes(self.mix)

    def result(self, seconds_alone: float) -> SearchResult:
        """The plans, best first; raises if there is none."""
        if not self.plans:
            raise InfeasibleError(_why_nothing(self.rejected))
        plans = sorted(self.plans, key=lambda ranked: self.objective.of(ranked.prediction))
        return SearchResult(tuple(plans), tuple(self.rejected), self.objective, seconds_alone)

    def _strategy(self, strategy: str, ranks: int) -> None:
        legal = []
        for candidate in self.candidates.of(strategy, ranks):
            refusal = self.candidates.refusal(candidate)
            if refusal is None:
                legal.append(candidate)
            else:
                self._reject(candidate, refusal)
        climb = Climb(
            candidates=legal,
            shape=self.candidates.shape,
            evaluate=self._best_of,
            key=self._key,
            most=self.limits.most_meshes,
            promising=self._promising,
            others=tuple(self.plans),
        )
        climb.run()
        for candidate in legal:
            if candidate not in climb.tried:
                self._reject(candidate, _not_evaluated(climb.tried))

    @property
    def _promising(self) -> float:
        """The cost above which nothing near a plan is evaluated."""
        return self.limits.hope * min((self._key(plan).cost for plan in self.plans), default=math.inf)

    def _best_of(self, candidate: Candidate) -> Ranked | None:
        """The best plan of a candidate; all that fit are kept."""
        try:
            plans = list(self.evaluate(candidate))
        except ConvMeshError as error:
            self._reject(candidate, Refusal(kind=RefusalKind.ERROR, detail=str(error)))
            return None
        fitting = [ranked for ranked in plans if self._key(ranked).beyond <= 0]
        self.plans += fitting
        if not fitting:
            self._reject(candidate, self._beyond(plans[0]))
        return min(fitting or plans, key=self._key)

    def _key(self, ranked: Ranked) -> PlanOrder:
        beyond = ranked.prediction.bytes_needed / self.limits.bytes_memory - 1
        return PlanOrder(max(0.0, beyond), lambda: self.objective.of(ranked.prediction))

    def _beyond(self, ranked: Ranked) -> Refusal:
        most = max(ranked.prediction.memory.values(), key=lambda memory: memory.bytes_peak)
        needed, limit = most.bytes_needed, int(self.limits.bytes_memory)
        return Refusal(kind=RefusalKind.MEMORY, subject="memory", needed=needed, limit=limit, layer=most.layer)

    def _mixes(self, mix: Mix) -> None:
        promising = self._promising
        by_cost = sorted((plan for plan in self.plans if self._key(plan).cost <= promising), key=self._key)
        meshes = list(dict.fromkeys(r.mesh for r in by_cost if "pipe" not in r.mesh.axes and r.mesh.size > 1))
        for mesh in meshes[: self.limits.mixes]:
            self.progress(f"splits layer by layer on {mesh}")
            for ranked in mix(mesh):
                if self._key(ranked).beyond <= 0 and not any(ranked.is_like(other) for other in self.plans):
                    self.plans.append(ranked)

    def _reject(self, candidate: Candidate, refusal: Refusal) -> None:
        self.rejected.append(Rejected(candidate.strategy, candidate.mesh, refusal))


def _not_evaluated(tried: dict[Candidate, Ranked | None]) -> Refusal:
    evaluated = [ranked for ranked in tried.values() if ranked is not None]
    detail = "; similar meshes have no plan"
    if evaluated:
        best = min(evaluated, key=lambda ranked: ranked.prediction.seconds_step)
        alone = "this strategy's most promising mesh, and already too slow"
        rank = alone if len(tried) == 1 else f"the best of the {len(tried)} evaluated"
        detail = f"; {best.mesh} was {rank}"
    return Refusal(kind=RefusalKind.NOT_EVALUATED, detail=detail)


def _why_nothing(rejected: Sequence[Rejected]) -> str:
    """One refusal for each strategy: memory, if a plan would fit with more of it."""
    by_strategy: dict[str, Rejected] = {}
    for one in rejected:
        nearest = by_strategy.get(one.strategy)
        if nearest is None or (_is_memory(one) and not _is_memory(nearest)):
            by_strategy[one.strategy] = one
    lines = "".join(f"\n  {one}" for one in by_strategy.values())
    scarce = any(map(_is_memory, rejected))
    advice = (
        "more ranks, a smaller batch or a smaller sample" if scarce else "fewer ranks, another number or a larger batch"
    )
    return f"no plan fits; use {advice}:{lines}"


def _is_memory(rejected: Rejected) -> bool:
    return rejected.refusal.kind is RefusalKind.MEMORY
