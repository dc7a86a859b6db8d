"""The search: strategies on meshes, each refused with a reason or evaluated, then mixes on the best meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from convmesh.errors import ConvMeshError, InfeasibleError
from convmesh.layout import Mesh
from convmesh.oracle.search.candidates import Candidate, Candidates
from convmesh.oracle.search.climb import Climb, Key
from convmesh.oracle.search.objectives import Objective
from convmesh.oracle.search.refusal import Refusal, RefusalKind
from convmesh.oracle.search.results import Found, Ranked, Rejected
from convmesh.plans import STRATEGIES

Evaluate = Callable[[Candidate], Sequence[Ranked]]
"""A candidate as plans with predictions: as it is, and where that does not fit, in ways that hold less."""

Mix = Callable[[Mesh], Sequence[Ranked]]
"""Plans for a mesh in which layers are split differently."""


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """What plans must keep within, and how much may be worked out."""

    bytes_memory: float
    most_meshes: int = 5
    """Meshes to work out of each strategy."""
    hope: float = 1.3
    """How much more than the best so far a strategy's first mesh may cost, for others to be worked out too."""
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
        """Look at all strategies on so many ranks; on one they are all the same."""
        for strategy in strategies if ranks > 1 else strategies[:1]:
            self.progress(f"{strategy} on {ranks} ranks" if ranks > 1 else "one device")
            self._strategy(strategy, ranks)
        if self.mix is not None:
            self._mixes(self.mix)

    def found(self, seconds_alone: float) -> Found:
        """What was found, best first; refuses if nothing was."""
        if not self.plans:
            raise InfeasibleError(_why_nothing(self.rejected))
        plans = sorted(self.plans, key=lambda ranked: self.objective.of(ranked.prediction))
        return Found(tuple(plans), tuple(self.rejected), self.objective, seconds_alone)

    def _strategy(self, strategy: str, ranks: int) -> None:
        legal = []
        for candidate in self.candidates.of(strategy, ranks):
            why = self.candidates.refusal(candidate)
            if why is None:
                legal.append(candidate)
            else:
                self._reject(candidate, why)
        climb = Climb(
            candidates=legal,
            shape=self.candidates.shape,
            evaluate=self._best_of,
            key=self._key,
            most=self.limits.most_meshes,
            promising=self.limits.hope * min((self._key(plan)[1] for plan in self.plans), default=math.inf),
        )
        climb.run()
        for candidate in legal:
            if candidate not in climb.tried:
                self._reject(candidate, _not_evaluated(climb.tried))

    def _best_of(self, candidate: Candidate) -> Ranked | None:
        """The best way to run a candidate; those that fit are kept."""
        try:
            made = list(self.evaluate(candidate))
        except ConvMeshError as error:
            self._reject(candidate, Refusal(kind=RefusalKind.ERROR, detail=str(error)))
            return None
        fitting = [ranked for ranked in made if self._key(ranked)[0] <= 0]
        self.plans += fitting
        if not fitting:
            self._reject(candidate, self._beyond(made[0]))
        return min(fitting or made, key=self._key)

    def _key(self, ranked: Ranked) -> Key:
        beyond = ranked.prediction.bytes_needed / self.limits.bytes_memory - 1
        return max(0.0, beyond), self.objective.of(ranked.prediction)

    def _beyond(self, ranked: Ranked) -> Refusal:
        most = max(ranked.prediction.memory.values(), key=lambda memory: memory.bytes_peak)
        needed, limit = most.bytes_needed, int(self.limits.bytes_memory)
        return Refusal(kind=RefusalKind.MEMORY, subject="memory", needed=needed, limit=limit, layer=most.layer)

    def _mixes(self, mix: Mix) -> None:
        by_cost = sorted(self.plans, key=self._key)
        meshes = list(dict.fromkeys(r.mesh for r in by_cost if "pipe" not in r.mesh.axes and r.mesh.size > 1))
        for mesh in meshes[: self.limits.mixes]:
            self.progress(f"splits layer by layer on {mesh}")
            for ranked in mix(mesh):
                if self._key(ranked)[0] <= 0 and not any(ranked.is_like(known) for known in self.plans):
                    self.plans.append(ranked)

    def _reject(self, candidate: Candidate, refusal: Refusal) -> None:
        self.rejected.append(Rejected(candidate.strategy, candidate.mesh, refusal))


def _not_evaluated(tried: dict[Candidate, Ranked | None]) -> Refusal:
    evaluated = [ranked for ranked in tried.values() if ranked is not None]
    detail = "; similar meshes have no plan"
    if evaluated:
        best = min(evaluated, key=lambda ranked: ranked.prediction.seconds_step)
        rank = f"the best of the {len(tried)} evaluated" if len(tried) > 1 else "more promising, and too slow"
        detail = f"; {best.mesh} was {rank}"
    return Refusal(kind=RefusalKind.NOT_EVALUATED, detail=detail)


def _why_nothing(rejected: Sequence[Rejected]) -> str:
    """One reason for each strategy, the one that comes nearest."""
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
