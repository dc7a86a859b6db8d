"""Lowering: a plan and a network become the program of one rank, cached with the network."""

from __future__ import annotations

from convmesh.dist import dry_mesh
from convmesh.errors import PlanError
from convmesh.graph import Captured
from convmesh.lowering.graph_walk import Lowering
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.lowering_cache import LoweringCache, Problem, cache_of
from convmesh.lowering.plan_variants import with_variant, without_variant
from convmesh.lowering.stage_program import microbatch, on_stage
from convmesh.plans import Plan


def lower(captured: Captured, plan: Plan, rank: int = 0, samples: int | None = None, device: str = "cuda") -> Lowered:
    """Lower a plan for one rank; needs no processes.

    `samples` is the global batch, or micro-batch of a pipeline, if it is not the plan's own. `device` is the kind of
    device, cpu or cuda, whose kernels the program names.
    """
    cache = cache_of(captured)
    if plan.pipeline is None:
        return _whole(cache, captured, plan, rank, samples, device)
    micro = samples or microbatch(captured.graph, plan.pipeline)

    def staged() -> Lowered:
        # Ranks that differ in their stage alone share one walk; the pipe axis is the outermost.
        first = rank % (plan.mesh.size // plan.mesh.axes.get("pipe", 1))
        whole = _whole(cache, captured, plan, first, micro, device)
        return on_stage(whole, captured.graph, dry_mesh(plan.mesh, rank, device))

    return cache.lowered(Problem(plan, rank, micro, device, of_stage=True), staged)


def _whole(
    cache: LoweringCache, captured: Captured, plan: Plan, rank: int, samples: int | None, device: str
) -> Lowered:
    """All layers of the network, on a rank of every stage."""

    def walked() -> Lowered:
        plain = without_variant(plan)
        if plain == plan:
            return Lowering(captured, plan, rank, samples, device, cache).run()
        # Plans that differ in no more than that share one walk.
        lowered = _whole(cache, captured, plain, rank, samples, device)
        return with_variant(lowered, plan, dry_mesh(plan.mesh, rank, device))

    return cache.lowered(Problem(plan, rank, samples, device), walked)


def lower_plan(plan: Plan, rank: int = 0, device: str = "cuda") -> Lowered:
    """The plan lowered for a rank of its mesh, if it was made from a model; `device`: whose kernels run."""
    if plan.source is None:
        raise PlanError("the plan was read from a file; give it a model with `cm.plan(model, sample, mesh, plan)`.")
    return lower(plan.source, plan, rank, device=device)
