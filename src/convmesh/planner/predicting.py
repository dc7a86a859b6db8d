"""Predictions for plans: their programs lowered for a few ranks that stand for all, and priced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from convmesh.errors import PlanError
from convmesh.layout import Mesh
from convmesh.layout.mesh import SPACE_AXES
from convmesh.lowering.loss_node import with_loss
from convmesh.lowering.lower import lower_plan
from convmesh.lowering.lowered import Lowered
from convmesh.oracle import Assumptions, Prediction, predict_programs
from convmesh.plans import Plan, Program
from convmesh.plans.plan import Precision
from convmesh.system import System


@dataclass(frozen=True)
class Criterion:
    """A loss of a network's output and a target of the global batch."""

    loss: Callable[..., Any]
    target: torch.Tensor
    """Only its shape and type matter."""

    def after(self, lowered: Lowered) -> Program:
        """The program with the loss, if its rank has the network's end."""
        program = lowered.program
        if program.nodes[-1].stage < program.stages - 1:
            return program
        shape = tuple(self.target.shape)
        if shape and lowered.plan.pipeline is not None:
            shape = (shape[0] // lowered.plan.pipeline.microbatches, *shape[1:])
        made = with_loss(lowered, self.loss, shape, self.target.dtype)
        return replace(made, nodes=(*made.nodes[:-1], replace(made.nodes[-1], stage=program.stages - 1)))


def predict(
    plan: Plan,
    system: System | str,
    assumptions: Assumptions | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    target: torch.Tensor | None = None,
    precision: Precision | None = None,
    compile: bool | None = None,  # noqa: A002 - as in `parallelize`
) -> Prediction:
    """What one training step of `plan` costs on a system, given as a value, a name or the path of a file.

    A plan does not know the loss; it counts too if `loss` and a `target` of the global batch (meta will do) are given.
    `precision` stands in for the plan's own: "amp-bf16" and "amp-fp16" are steps under `torch.autocast`, "" is one in
    the types of the weights. So does `compile`: True is a step as `parallelize(..., compile=True)` runs it.
    """
    if (loss is None) != (target is None):
        raise PlanError("`loss` and `target` go together: give both, or neither to leave the loss out.")
    plan = plan if precision is None else replace(plan, precision=precision)
    plan = plan if compile is None else replace(plan, compile=compile)
    known = System.load(system) if isinstance(system, str) else system
    criterion = None if loss is None or target is None else Criterion(loss, target)
    ranks = [*representatives(plan.mesh, borders=True), *busiest_in_rings(plan)]
    programs = programs_of(plan, ranks, criterion, device=known.torch_device)
    return predict_programs(programs, known, assumptions)


def representatives(mesh: Mesh, *, borders: bool = False) -> list[int]:
    """Ranks that stand for all: in every stage, one away from the borders of axes that cut space, else the first.

    With `borders` also one that is first along all those axes, and one that is last. Of uneven parts the larger ones
    come first, so that the second rank has the most work, and neighbours on both sides. Where the mesh has shares, the
    rank with the largest ones is among them.
    """
    space = {name: extent for name, extent in mesh.axes.items() if name in SPACE_AXES}
    inside = {name: min(1, extent - 1) for name, extent in space.items()}
    first, last = dict.fromkeys(space, 0), {name: extent - 1 for name, extent in space.items()}
    largest = {name: parts.index(max(parts)) for name, parts in mesh.shares.items()}
    places = [inside, *([first, last] if borders else []), *([{**inside, **largest}] if largest else [])]
    stages = range(mesh.axes.get("pipe", 1))
    whole = dict.fromkeys(mesh.axes, 0)
    pairs = itertools.product(stages, places)
    return list(dict.fromkeys(mesh.rank({**whole, **place, "pipe": stage}) for stage, place in pairs))


def busiest_in_rings(plan: Plan) -> list[int]:
    """Where keys pass round, the rank that comes last along all axes: behind a causal mask it sees the most."""
    if plan.attention != "ring" or plan.pipeline is not None:
        return []
    return [plan.mesh.size - 1]


def programs_of(
    plan: Plan, ranks: Iterable[int], criterion: Criterion | None = None, *, device: str = "cuda"
) -> dict[int, Program]:
    """The programs of some ranks, each driving a kind of device."""
    return {rank: _ended(lower_plan(plan, rank, device), criterion) for rank in ranks}


def _ended(lowered: Lowered, criterion: Criterion | None) -> Program:
    return lowered.program if criterion is None else criterion.after(lowered)
