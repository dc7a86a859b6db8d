"""What a plan may change without changing any layer: how gradients are summed, and what is recomputed."""

from __future__ import annotations

from dataclasses import replace

from convmesh.dist import OpenMesh
from convmesh.lowering.gradient_sums import with_sums
from convmesh.lowering.lowered import Lowered
from convmesh.plans import Plan, Program


def without_variant(plan: Plan) -> Plan:
    """The plan with the default sums and nothing recomputed: its layers do the same."""
    return replace(plan, reduction="bucketed", compression="none", ranks_per_host=1, checkpoint=())


def with_variant(lowered: Lowered, plan: Plan, mesh: OpenMesh) -> Lowered:
    """A lowering of `without_variant(plan)`, changed to that of the plan itself."""
    program = _recomputing(lowered.program, plan) if plan.checkpoint else lowered.program
    if plan.pipeline is None and plan.summing != lowered.plan.summing:  # stages sum for themselves
        program = with_sums(program, lowered.sum_axes, mesh, plan.summing)
    chosen = replace(
        lowered.plan,
        reduction=plan.reduction,
        compression=plan.compression,
        ranks_per_host=plan.ranks_per_host,
        checkpoint=plan.checkpoint,
    )
    return replace(lowered, plan=chosen, program=program)


def _recomputing(program: Program, plan: Plan) -> Program:
    nodes = tuple(replace(node, block=plan.recomputed(node.layer) or "") for node in program.nodes)
    return replace(program, nodes=nodes)
