"""The loss as one more node of a program: a plan does not know it, whoever measures or predicts a step may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from convmesh.dist import dry_mesh
from convmesh.parallel.lowering.dry import Dry, DryResult, DryRunner
from convmesh.parallel.lowering.lower import Lowered
from convmesh.parallel.recorder import dtype_name, recorded
from convmesh.parallel.running.placing import target_layout
from convmesh.plan import NodeProgram, Program

LOSS = "loss"
"""The node's name."""


def with_loss(
    lowered: Lowered, loss: Callable[..., Any], target_shape: Sequence[int], target_dtype: torch.dtype
) -> Program:
    """The program with the loss of its last node's output after it, and the look at the loss that the runtime takes."""
    program = lowered.program
    last = program.nodes[-1]
    mesh = dry_mesh(program.mesh, program.rank)
    output = Dry(last.outputs[0], lowered.dtypes[last.node], True)
    target = Dry(target_layout(output.layout, tuple(target_shape)), target_dtype, False)
    result = DryRunner(mesh).run(None, loss, ((output, target), {}))
    return replace(program, nodes=(*program.nodes, _node(last, result, output, mesh)))


def _node(last: NodeProgram, result: DryResult, output: Dry, mesh: Any) -> NodeProgram:
    with torch.no_grad(), recorded(mesh) as looks:
        output.on(mesh).local.isfinite().all()
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
    )
