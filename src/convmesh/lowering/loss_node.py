"""The loss as one more node of a program: a plan does not know it, but whoever measures or predicts a step may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from convmesh.dist import StepSettings, dry_mesh
from convmesh.kernels.finite_check import all_finite
from convmesh.layout import Layout
from convmesh.lowering.dry_call import PlainCall
from convmesh.lowering.dry_run import DryRunner
from convmesh.lowering.dry_values import Dry, DryResult
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.operator_calls import dtype_name
from convmesh.lowering.recorder import recorded
from convmesh.lowering.value_flow import FlowNotes
from convmesh.plans import NodeProgram, Program
from convmesh.plans.loss_memory import LOSS


def with_loss(
    lowered: Lowered, loss: Callable[..., Any], target_shape: Sequence[int], target_dtype: torch.dtype
) -> Program:
    """The program followed by the loss of its last node's output, and the finite check that the runtime does."""
    program = lowered.program
    last = program.nodes[-1]
    settings = StepSettings(precision=lowered.plan.precision, compile=lowered.plan.compile)
    mesh = dry_mesh(program.mesh, program.rank, lowered.device).with_settings(settings)
    output = Dry(last.outputs[0], lowered.dtypes[last.node], True)
    target = Dry(target_layout(output.layout, tuple(target_shape)), target_dtype, False)
    result = DryRunner(mesh).run(PlainCall(loss, is_known=False), ((output, target), {}))
    return replace(program, nodes=(*program.nodes, _node(last, result, output, mesh)))


def _node(last: NodeProgram, result: DryResult, output: Dry, mesh: Any) -> NodeProgram:
    local = output.on(mesh).local
    notes = FlowNotes([local]) if mesh.settings.compile else None
    with torch.no_grad(), recorded(mesh, flow=None if notes is None else notes.forward) as looks:
        all_finite(local)
    value: Dry = result.value
    return NodeProgram(
        node=LOSS,
        layer=LOSS,
        inputs=last.outputs,
        outputs=(value.layout,),
        dtypes=(dtype_name(value.dtype),),
        forward=(*result.forward, *looks),
        backward=result.backward,
        saved=result.saved,
        sources=(last.node,),
        held=result.held,
        flow=result.flow if notes is None else result.flow.then(len(result.forward), notes.flow(())),
    )


def target_layout(output: Layout, shape: tuple[int, ...]) -> Layout:
    """A target is cut where the output is: the same dims, or all but the channels, or samples only, or not at all."""
    if shape == output.shape:
        return output
    if shape == output.shape[:1] + output.shape[2:]:
        return Layout(output.mesh, (output.cuts[0], *output.cuts[2:]))
    whole = Layout.of(output.mesh, shape)
    if shape and output.shape and shape[0] == output.shape[0]:
        return whole.replacing({0: output.cuts[0]})
    return whole
