"""Filling in a plan's pipeline: stages of about equal time, and how many micro-batches run through them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from convmesh.errors import PlanError
from convmesh.graph import Captured, Graph
from convmesh.lowering.lower import lower
from convmesh.lowering.lowered import Lowered
from convmesh.plans import Pipeline, Plan
from convmesh.plans.balance import Cost
from convmesh.plans.pipeline_rules import MICROBATCHES_A_STAGE, STAGES_A_RANK, equal_share, in_flight, microbatches_for
from convmesh.plans.plan import Schedule
from convmesh.plans.stage_costs import node_costs
from convmesh.plans.stage_graph import StageGraph, cut_stages


@dataclass(frozen=True, slots=True)
class StageOptions:
    """What a user may choose about stages."""

    microbatches: int | None = None
    schedule: Schedule = "1f1b"
    bytes_stage: int | None = None


def with_stages(captured: Captured, plan: Plan, options: StageOptions, device: str) -> Plan:
    """The plan with its layers in stages, balanced by what a rank computes for them on a kind of device."""
    asked = 1 if options.microbatches is None else options.microbatches
    Pipeline(schedule=options.schedule, microbatches=asked)  # refuses other names and numbers
    lowered, pipe = lower(captured, plan, device=device), plan.mesh.axes["pipe"]
    stages = pipe * STAGES_A_RANK[options.schedule]
    samples = _samples_a_rank(lowered, captured.graph)
    limit = MICROBATCHES_A_STAGE * stages
    count = options.microbatches or microbatches_for(samples, limit, options.schedule, pipe)
    costs = {name: _of_microbatch(cost, count) for name, cost in node_costs(lowered.program, captured.graph).items()}
    kept = in_flight(options.schedule, count, stages, pipe)
    starts = cut_stages(captured.graph, costs, stages, kept, options.bytes_stage)
    pipeline = Pipeline(starts=starts, microbatches=count, schedule=options.schedule)
    return replace(plan, pipeline=pipeline, notes=(*plan.notes, *_notes(captured.graph, pipeline, costs)))


def _samples_a_rank(lowered: Lowered, graph: Graph) -> int:
    """Samples of each rank; their greatest common divisor if ranks have different numbers."""
    layouts = [lowered.layouts[node.name][0] for node in graph.inputs]
    if any(not layout.shape for layout in layouts):
        raise PlanError("a pipeline cuts batches into micro-batches, but an input of the network has no samples.")
    return max(1, equal_share(*(layout.cuts[0].partition for layout in layouts)))


def _of_microbatch(cost: Cost, count: int) -> Cost:
    return replace(cost, seconds=cost.seconds / count, bytes_kept=cost.bytes_kept // count)


def _notes(graph: Graph, pipeline: Pipeline, costs: dict[str, Cost]) -> list[str]:
    row = StageGraph.of(graph)
    bounds = row.bounds(pipeline.starts)
    by_place = [costs.get(node.name, Cost()).seconds for node in row.calls]
    seconds = [math.fsum(by_place[begin:end]) for begin, end in itertools.pairwise(bounds)]
    total = math.fsum(seconds) or 1.0
    shares = ", ".join(f"{part / total:.0%}" for part in seconds)
    notes = [f"stages take {shares} of the predicted time; {pipeline.microbatches} micro-batches, {pipeline.schedule}"]
    if pipeline.microbatches > 1 and any(node.kind == "batch_norm" for node in graph.nodes):
        notes.append("batch norm takes its statistics over each micro-batch, as accumulating their gradients would")
    return notes
