"""Nodes that the tracer could not look into, in a dry run: the cost of their inputs' change of layout, and no more."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from convmesh.graph import Node
from convmesh.lowering.dry_call import PlainCall
from convmesh.lowering.dry_run import DryRunner
from convmesh.lowering.dry_values import Dry, DryResult, Strides
from convmesh.lowering.opaque import by_samples, mixes_samples, opaque_layout, uncut
from convmesh.plans import Work


def run_unseen(
    runner: DryRunner,
    spec: Node,
    shapes: Sequence[tuple[int, ...]],
    inputs: Sequence[Dry],
    module: nn.Module,
    arriving: tuple[Strides | None, ...] = (),
) -> DryResult:
    """A node whose samples stay cut, unless it mixes them; `shapes` are its outputs'.

    What it computes is unknown, and so is the effect of a gradient's strides.
    """
    del arriving
    mesh, lead = runner.mesh, inputs[0].layout
    arranged, first = (uncut, 0) if mixes_samples(module, spec) else (by_samples, 1)
    samples = lead.with_whole([dim for dim in range(first, len(lead.cuts)) if lead.is_cut(dim)])
    learns = any(x.learns for x in inputs) or any(weight.learns for weight in spec.weights)
    made = [
        Dry(opaque_layout(samples, shape, spec.layer), getattr(torch, value.dtype), learns)
        for shape, value in zip(shapes, spec.outputs, strict=True)
    ]
    local = tuple(tuple(x.layout.box(mesh.rank).shape) for x in made)
    work = Work(spec.op, (), local, spec.outputs[0].dtype if spec.outputs else "", 0, 0)
    moved = [runner.run(PlainCall(arranged, is_known=True), ((x,), {})) for x in inputs]
    forward = (*(step for run in moved for step in run.forward), work)
    backward = (work, *(step for run in moved for step in run.backward))
    gradient_strides = tuple(x.gradient(mesh, None).stride() if x.learns else None for x in inputs)
    return DryResult(
        made[0] if len(made) == 1 else tuple(made), forward, backward, (), (samples.axes,), gradients=gradient_strides
    )
