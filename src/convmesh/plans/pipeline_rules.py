"""Rules of a pipeline: the stages of each rank, the number of micro-batches, the needs of a schedule."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING

from convmesh.errors import PlanError
from convmesh.graph import Graph
from convmesh.layout.mesh import Mesh
from convmesh.layout.partition import Partition
from convmesh.plans.stage_graph import StageGraph
from convmesh.plans.stage_order import actions_of

if TYPE_CHECKING:
    from convmesh.plans.plan import Pipeline, Plan

STAGES_A_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
"""Stages on each rank, unless the plan's `starts` say otherwise."""

MICROBATCHES_A_STAGE = 4
"""Enough to make idle time at both ends of a step a small share of it."""


def stages_of(pipeline: Pipeline) -> int:
    return len(pipeline.starts) + 1


def own_stages(pipeline: Pipeline, mesh: Mesh, rank: int) -> range:
    """The stages of a rank; stages are dealt out in turn along the pipe axis."""
    return range(mesh.coordinates(rank)["pipe"], stages_of(pipeline), mesh.axes["pipe"])


def rank_of(stage: int, mesh: Mesh, rank: int) -> int:
    """The rank with a stage, among those that differ from `rank` on the pipe axis only."""
    return mesh.rank({**mesh.coordinates(rank), "pipe": stage % mesh.axes["pipe"]})


def suits(schedule: str, microbatches: int, pipe: int) -> bool:
    """Whether a schedule can run `microbatches`: looped schedules need equal rounds."""
    rounds = max(1, microbatches // pipe)
    return schedule in ("gpipe", "1f1b") or microbatches % rounds == 0


def microbatches_for(samples: int, limit: int, schedule: str, pipe: int) -> int:
    """The largest number of equal micro-batches of a rank's samples, up to a limit, that the schedule can run."""
    numbers = range(min(samples, limit), 0, -1)
    return next((n for n in numbers if samples % n == 0 and suits(schedule, n, pipe)), 1)


def equal_share(*partitions: Partition) -> int:
    """The greatest common divisor of the parts' samples, which micro-batches must divide."""
    return math.gcd(*(b - a for partition in partitions for a, b in itertools.pairwise(partition.bounds)))


def in_flight(schedule: str, microbatches: int, stages: int, pipe: int) -> list[int]:
    """The most micro-batches whose activations each stage keeps at once."""
    most, now = Counter[int](), Counter[int]()
    for place in range(pipe):
        for action in actions_of(schedule, pipe, stages, microbatches, place):
            now[action.stage] += {"forward": 1, "backward": -1, "input": 0, "weight": -1}[action.kind]
            most[action.stage] = max(most[action.stage], now[action.stage])
    return [most[stage] for stage in range(stages)]


def check_pipeline(plan: Plan, graph: Graph) -> None:
    """Refuse stages that do not fit the network or the mesh."""
    pipeline, pipe = plan.pipeline, plan.mesh.axes.get("pipe", 1)
    assert pipeline is not None
    if pipe == 1:
        raise PlanError(f"the plan has a [pipeline], but {plan.mesh} has no pipe axis; add pipe= to the mesh.")
    stages, single = stages_of(pipeline), pipeline.schedule in ("gpipe", "1f1b")
    if (single and stages != pipe) or stages % pipe:
        wanted = f"{pipe}" if single else f"a multiple of {pipe}"
        raise PlanError(
            f"`starts` makes {stages} stages; schedule {pipeline.schedule!r} on {plan.mesh} needs {wanted}: "
            f"name the first layer of each stage but the first."
        )
    if not suits(pipeline.schedule, pipeline.microbatches, pipe):
        raise PlanError(
            f"`microbatches` (={pipeline.microbatches}) must be a multiple of {pipeline.microbatches // pipe} rounds "
            f"for schedule {pipeline.schedule!r} on {pipe} ranks; a multiple of {pipe} always is."
        )
    row = StageGraph.of(graph)
    row.bounds(pipeline.starts)
    if pipeline.schedule == "zero-bubble":
        _check_zero_bubble(plan, row)


def _check_zero_bubble(plan: Plan, row: StageGraph) -> None:
    """Weight gradients are computed separately from input gradients: each weight has one use, no block is
    recomputed."""
    if plan.checkpoint:
        raise PlanError("schedule 'zero-bubble' cannot be combined with `checkpoint`; use '1f1b' or 'interleaved'.")
    uses = Counter(weight.name for node in row.calls for weight in node.weights if weight.learns)
    if repeated := [name for name, count in uses.items() if count > 1]:
        raise PlanError(
            f"schedule 'zero-bubble' needs every weight to be used once, but {repeated[0]!r} is used several times; "
            "use '1f1b' or 'interleaved'."
        )
