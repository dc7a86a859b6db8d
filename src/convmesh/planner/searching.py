"""Searching for plans: the pure search of the oracle, with lowering to make programs for it."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from convmesh.errors import ConvMeshError, PlanError
from convmesh.graph import Captured
from convmesh.layout import Mesh
from convmesh.lowering.lower import lower
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.lowering_cache import unchanged_network
from convmesh.oracle import Assumptions, predict_programs
from convmesh.oracle.search import Candidate, Candidates, Ranked, Search, SearchLimits, SearchResult
from convmesh.oracle.search.objectives import objective as objective_called
from convmesh.oracle.search.rare_collection import rare_collection
from convmesh.planner.drafting import DraftOptions, Sample, Splits, draft, network_of
from convmesh.planner.mixing import mixes_on
from convmesh.planner.predicting import busiest_in_rings, predict, programs_of, representatives
from convmesh.plans import STRATEGIES, Plan, Program, Transfer, strategy_for
from convmesh.plans.plan import Precision
from convmesh.plans.presets import AXES_OF
from convmesh.plans.summing import Summing
from convmesh.system import System

DEFAULT_SYSTEM = "dgx-a100"
MOST_DEPTH = 5
"""How deep modules may be nested to be candidates for recomputation."""

MOST_RANKS = 1 << 20
"""Planning for a mesh takes time and memory for each of its ranks."""

MIX = "mix"
"""The strategy of plans whose layers are split one by one."""

RESCORED = 8
"""First plans of a result that are predicted again with ranks at the borders of space too."""


def search(
    model: nn.Module | Captured,
    sample: Sample,
    system: System | str | None = None,
    *,
    gpus: int,
    objective: str = "time",
    samples: int | None = None,
    strategies: Sequence[str] | None = None,
    precision: Precision = "",
    compile: bool = False,  # noqa: A002 - as in `parallelize`
    assumptions: Assumptions | None = None,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Plans for `gpus` ranks of a system, best first, and why others are not among them.

    `objective` is what to minimise: time (of a step), epoch (of `samples` samples), memory, energy or cost.
    `strategies` are those to consider; by default all, and mixes of splits layer by layer. With `precision` "amp-bf16"
    or "amp-fp16" steps run under `torch.autocast`; with `compile`, as `parallelize(..., compile=True)` runs them.
    """
    captured, options = network_of(model, sample), DraftOptions(precision=precision, compile=compile)
    return search_captured(
        captured,
        system,
        gpus,
        objective,
        samples,
        strategies,
        options=options,
        assumptions=assumptions,
        progress=progress,
    )


def search_captured(
    captured: Captured,
    system: System | str | None,
    gpus: int,
    aim: str = "time",
    samples: int | None = None,
    strategies: Sequence[str] | None = None,
    *,
    options: DraftOptions | None = None,
    assumptions: Assumptions | None = None,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """As `search`, for a network that was captured."""
    bench = Bench(captured, loaded(system, gpus), assumptions or Assumptions(), options or DraftOptions())
    _check(gpus, bench.system, strategies)
    candidates = Candidates(captured.graph, bench.alone)
    wanted = objective_called(aim, candidates.batch, samples)
    run = Search(
        candidates=candidates,
        objective=wanted,
        limits=SearchLimits(bytes_memory=float(bench.system.device.bytes_memory)),
        evaluate=bench.evaluate,
        mix=None if strategies else bench.mixes,
        progress=progress or (lambda _: None),
    )
    with rare_collection(), unchanged_network(captured):
        run.run(gpus, strategies or STRATEGIES)
        return bench.rescored(run.result(bench.seconds_alone))


def loaded(system: System | str | None, ranks: int = 1) -> System:
    """A system by value, name or path; without one, this machine, if it was calibrated and has enough devices."""
    if system is not None:
        return system if isinstance(system, System) else System.load(system)
    if "local" in System.names():
        local = System.load("local")
        if local.most_devices is None or local.most_devices >= ranks:
            return local
    return System.load(DEFAULT_SYSTEM)


def _check(gpus: int, system: System, strategies: Sequence[str] | None) -> None:
    if gpus < 1:
        raise PlanError(f"`gpus` (={gpus}) must be a positive number of ranks.")
    check_ranks("gpus", gpus, system)
    if unknown := [name for name in strategies or () if name not in STRATEGIES]:
        raise PlanError(f"`strategies` has {unknown[0]!r}, which is none; there are {', '.join(STRATEGIES)}.")


def check_ranks(argument: str, ranks: int, system: System) -> None:
    """Refuse more ranks than a system has devices, or than anyone has."""
    if ranks > MOST_RANKS:
        raise PlanError(f"`{argument}` (={ranks}) must be at most {MOST_RANKS}.")
    built = None if system.node.count is None else int(system.node.count) * int(system.node.devices)
    most = min((known for known in (built, system.most_devices) if known is not None), default=None)
    if most is not None and ranks > most:
        raise PlanError(f"`{argument}` (={ranks}) is more than the {most} devices that system {system.name!r} has.")


def best_on(captured: Captured, mesh: Mesh, system: System | str | None, options: DraftOptions) -> Plan:
    """The plan for a mesh that is predicted to be fastest: a preset, or splits layer by layer.

    Where none fits the memory of the system's devices, the one that holds least is taken: they may have more.
    """
    known = loaded(system, mesh.size)
    device = known.torch_device
    fitting = [s for s in STRATEGIES if {*mesh.axes} <= {n for part in s.split("+") for n in AXES_OF[part]}]
    if mesh.size == 1 or "pipe" in mesh.axes:
        return decided(captured, draft(captured, mesh, strategy_for(mesh), options, device), device)
    bench = Bench(captured, known, Assumptions(), options)
    made, why = [], None
    for strategy in fitting:
        try:
            made.append(bench.ranked(bench.draft(mesh, strategy, options)))
        except ConvMeshError as error:
            why = error
    made += bench.mixes(mesh)
    if not made:
        raise why or PlanError(f"no split of any layer uses the axes of {mesh}; give a split for each layer.")
    best = min(made, key=bench.worth)
    return decided(captured, replace(best.plan, source=captured), device)


def decided(captured: Captured, plan: Plan, device: str) -> Plan:
    """A draft with every open choice made; lowering it also shows that every layer can run so."""
    return lower(captured, plan, device=device).plan


def _gathers_keys(program: Program) -> bool:
    attends = (node for node in program.nodes if node.kind == "scaled_dot_product_attention")
    return any(isinstance(step, Transfer) for node in attends for step in node.forward)


@dataclass(frozen=True)
class Bench:
    """Makes plans of one network and prices them on one system."""

    captured: Captured
    system: System
    assumptions: Assumptions
    options: DraftOptions

    def draft(self, mesh: Mesh, strategy: str | Splits, options: DraftOptions) -> Plan:
        """A plan for the system's devices with its open choices."""
        return draft(self.captured, mesh, strategy, options, self.system.torch_device)

    def _lower(self, plan: Plan, rank: int = 0) -> Lowered:
        return lower(self.captured, plan, rank, device=self.system.torch_device)

    @cached_property
    def alone(self) -> Program:
        """The program of one device that does it all."""
        return self._lower(self.draft(Mesh(), "data", replace(self.options, checkpoint=()))).program

    @cached_property
    def seconds_alone(self) -> float:
        return predict_programs({0: self.alone}, self.system, self.assumptions).seconds_step

    def evaluate(self, candidate: Candidate) -> list[Ranked]:
        """A candidate as it is; if that does not fit, also with sharded optimiser states, and with recomputation."""
        capacity, made = float(self.system.device.bytes_memory), []
        for options in self._variants(candidate):
            made.append(self.ranked(self.draft(candidate.mesh, candidate.strategy, options)))
            if made[-1].prediction.bytes_needed <= capacity:
                break
        return made

    def _variants(self, candidate: Candidate) -> list[DraftOptions]:
        variants = [self.options]
        summing = Summing(self.options.reduction, self.options.compression)
        if summing.reduction == "bucketed" and not summing.low_rank and "data" in candidate.mesh.axes:
            variants.append(replace(self.options, reduction="sharded"))
        if not self.options.checkpoint and self._blocks:
            variants.append(replace(variants[-1], checkpoint=self._blocks))
        return variants

    @cached_property
    def _blocks(self) -> tuple[str, ...]:
        """Modules to recompute: those at the depth where there are about as many modules as layers in each."""
        paths = [layer.split(".") for layer in self.captured.graph.layers]
        by_depth = [Counter(".".join(p[:depth]) for p in paths if len(p) > depth) for depth in range(1, MOST_DEPTH)]
        blocks = [tuple(name for name, layers in blocks_here.items() if layers > 1) for blocks_here in by_depth]
        wanted = math.sqrt(len(paths))
        return min((names for names in blocks if names), key=lambda names: abs(len(names) - wanted), default=())

    def ranked(self, plan: Plan) -> Ranked:
        """A draft with every open choice made, lowered for representative ranks, and priced.

        Where attention gathers keys and values, they may pass round instead, and where rings go over all ranks of
        several nodes, gradients may be summed inside nodes first, if that is faster or fits.
        """
        decided, programs = self.lowered(plan)
        best = Ranked(decided, predict_programs(programs, self.system, self.assumptions))
        if self.options.attention is None and any(map(_gathers_keys, programs.values())):
            best = min(best, self._priced(replace(plan, attention="ring")), key=self.worth)
        in_levels = self._in_levels(best.plan)
        return best if in_levels is None else min(best, self._priced(in_levels), key=self.worth)

    def _priced(self, plan: Plan) -> Ranked:
        decided, programs = self.lowered(plan)
        return Ranked(decided, predict_programs(programs, self.system, self.assumptions))

    def _in_levels(self, plan: Plan) -> Plan | None:
        """The plan with sums inside nodes before those across them, where the library knows no better than rings.

        Trees and hierarchical methods spare the network themselves, and are what these libraries were tuned for.
        """
        on_each = self.assumptions.ranks_per_node or int(self.system.node.devices)
        knows_better = any(method.algorithm != "ring" for method in self.system.collectives.over("network"))
        is_usual = plan.reduction == "bucketed" and not plan.summing.low_rank
        if knows_better or not is_usual or on_each == 1 or plan.mesh.size == on_each or plan.mesh.size % on_each:
            return None
        return replace(plan, reduction="hierarchical", ranks_per_host=on_each)

    def worth(self, ranked: Ranked) -> tuple[float, float]:
        """How far it exceeds the memory, then the time."""
        prediction = ranked.prediction
        return max(0.0, prediction.bytes_needed / float(self.system.device.bytes_memory) - 1), prediction.seconds_step

    def lowered(self, plan: Plan) -> tuple[Plan, dict[int, Program]]:
        """A draft with every open choice made, and the programs of ranks that stand for all."""
        ranks = representatives(plan.mesh)
        if plan.pipeline is not None:
            return plan, programs_of(plan, ranks, device=self.system.torch_device)
        rank = [*busiest_in_rings(plan), *ranks][0]
        lowered = self._lower(plan, rank)
        return lowered.plan, {rank: lowered.program}

    def mixes(self, mesh: Mesh) -> list[Ranked]:
        """Plans whose layers are split one by one, found for different shares of exposed gradient sums."""
        by_splits: dict[object, Ranked] = {}
        with contextlib.suppress(ConvMeshError):  # a network that cannot be mixed has presets all the same
            empty = self.draft(mesh, {"*": {}}, self.options)
            for splits in mixes_on(self.captured, mesh, self.system, self.assumptions, empty):
                ranked = self.ranked(replace(self.draft(mesh, splits, self.options), strategy=MIX))
                by_splits.setdefault(ranked.plan.splits, ranked)
        return list(by_splits.values())

    def rescored(self, result: SearchResult) -> SearchResult:
        """The same with the first plans priced at the borders of space too, and sorted again.

        Looking at more ranks can only find more waiting: a plan that comes after these cannot belong before them.
        """
        plans = list(result.plans)
        while waiting := [at for at, one in enumerate(plans[:RESCORED]) if not self._has_borders(one)]:
            plans[waiting[0]] = self.with_borders(plans[waiting[0]])
            plans.sort(key=lambda ranked: result.objective.of(ranked.prediction))
        presets = [ranked for ranked in plans if ranked.strategy != MIX]
        kept = (one for one in plans if one.strategy != MIX or not any(one.is_like(other) for other in presets))
        return replace(result, plans=tuple(kept))

    def with_borders(self, ranked: Ranked) -> Ranked:
        """A plan with a prediction that looks at the borders of space too."""
        if self._has_borders(ranked):
            return ranked
        return Ranked(ranked.plan, predict(ranked.plan, self.system, self.assumptions))

    def _has_borders(self, ranked: Ranked) -> bool:
        return {*representatives(ranked.mesh, borders=True)} <= {*ranked.prediction.memory}
