"""Strategies on more and more ranks: the best mesh of each, priced, and where each stops scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convmesh.graph import Captured
from convmesh.lowering.lowering_cache import unchanged_network
from convmesh.oracle import Assumptions, predict_programs
from convmesh.oracle.prediction import seconds_of
from convmesh.oracle.scaling_limits import Curve, Limit, ScalingPoint, Term, binding_term, limit_of
from convmesh.oracle.search import Candidates, Ranked, Refusal, RefusalKind, Search, SearchLimits
from convmesh.oracle.search.objectives import objective
from convmesh.planner.drafting import DraftOptions
from convmesh.planner.searching import Bench
from convmesh.system import System

SCALED = ("data", "spatial", "filter", "pipeline", "data+spatial", "data+filter")
"""Strategies to scale by default; channel scales as filter does."""

Capture = Callable[[int], Captured]
"""The network for N ranks: the same batch for strong scaling, a batch that grows with N for weak."""


def scale(
    capture: Capture,
    system: System,
    counts: Sequence[int],
    strategies: Sequence[str] = SCALED,
    assumptions: Assumptions | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    options: DraftOptions | None = None,
) -> Scaling:
    """The curves of strategies over counts of ranks."""
    benches: list[Bench] = []
    points: dict[str, list[ScalingPoint]] = {strategy: [] for strategy in strategies}
    for ranks in counts:
        captured = capture(ranks)
        if not benches or benches[-1].captured is not captured:
            benches.append(Bench(captured, system, assumptions or Assumptions(), options or DraftOptions()))
        if progress is not None:
            progress(f"{ranks} ranks" if ranks > 1 else "1 rank")
        candidates = Candidates(captured.graph, benches[0].alone)  # layers' shares of arithmetic are those of any batch
        with unchanged_network(captured):
            for strategy in strategies:
                points[strategy].append(_point(benches[-1], candidates, strategy, ranks, points[strategy]))
    curves = tuple(
        Curve(strategy, tuple(curve_points), _limit(curve_points, benches)) for strategy, curve_points in points.items()
    )
    return Scaling(_batch(benches[0]) / benches[0].seconds_alone, curves)


@dataclass(frozen=True)
class Scaling:
    """Curves, and the samples a second of one device with enough memory."""

    samples_per_second_alone: float
    curves: tuple[Curve, ...]

    def efficiency(self, point: ScalingPoint) -> float:
        """The speed, as a share of what as many devices working alone would reach together."""
        return point.samples_per_second / (point.ranks * self.samples_per_second_alone)


def _batch(bench: Bench) -> int:
    return bench.captured.graph.inputs[0].outputs[0].shape[0]


def _point(
    bench: Bench, candidates: Candidates, strategy: str, ranks: int, before: Sequence[ScalingPoint]
) -> ScalingPoint:
    """The best of the most promising meshes; nothing is evaluated beyond the ranks at which a strategy stops."""
    if any(point.ranked for point in before) and limit_of(before, lambda _: "computation"):
        return ScalingPoint(ranks, _batch(bench), None, Refusal(kind=RefusalKind.BEYOND_LIMIT))
    search = Search(
        candidates=candidates,
        objective=objective("time", candidates.batch),
        limits=SearchLimits(bytes_memory=float(bench.system.device.bytes_memory), most_meshes=2),
        evaluate=bench.evaluate,
    )
    search.run(ranks, (strategy,))
    if search.plans:
        best = min(search.plans, key=lambda ranked: ranked.prediction.seconds_step)
        return ScalingPoint(ranks, candidates.batch, bench.with_borders(best))
    if not search.rejected:
        no_mesh = Refusal(kind=RefusalKind.NO_MESH, subject=strategy, needed=ranks)
        return ScalingPoint(ranks, candidates.batch, None, no_mesh)
    refusals = [one.refusal for one in search.rejected]
    scarce = (refusal for refusal in refusals if refusal.kind is RefusalKind.MEMORY)
    return ScalingPoint(ranks, candidates.batch, None, next(scarce, refusals[0]))


def _limit(points: Sequence[ScalingPoint], benches: Sequence[Bench]) -> Limit | None:
    def binding(ranked: Ranked) -> Term:
        bench = next(bench for bench in benches if bench.captured is ranked.plan.source)
        _, programs = bench.lowered(ranked.plan)
        now = predict_programs(programs, bench.system, bench.assumptions)
        price = lambda system: seconds_of(programs, system, bench.assumptions)  # noqa: E731
        return binding_term(Ranked(ranked.plan, now), price)

    return limit_of(points, binding)
