"""The limits of a verification, for its reader."""

from __future__ import annotations

from torch import nn

from convmesh.graph import Graph
from convmesh.graph.kinds import DRAWS
from convmesh.layout import Mesh
from convmesh.plans import Plan
from convmesh.verification.result import Shapes


def mesh_notes(plan: Plan, mesh: Mesh) -> list[str]:
    if mesh == plan.mesh:
        return []
    dropped = [name for name in plan.mesh.axes if name not in mesh.axes]
    kept = f"nothing is cut by {', '.join(dropped)}, so that is not verified" if dropped else "the same axes and cuts"
    return [f"{plan.mesh} has {plan.mesh.size} ranks; verified on {mesh}: {kept}"]


def shape_notes(planned: Shapes, shapes: Shapes) -> list[str]:
    if shapes == planned:
        return []
    return [f"inputs {planned} shrunk to {shapes}: every layer is cut as in the plan"]


def network_notes(graph: Graph, model: nn.Module, pipeline: object) -> list[str]:
    # A stage sees micro-batches; one process sees the batch.
    notes = ["outputs of layers inside a pipeline are not compared, only their weights and the loss"] * bool(pipeline)
    notes += [f"layer {layer} stays closed, only its samples are cut: {why}" for layer, why in graph.opaque.items()]
    if any(node.kind in DRAWS for node in graph.nodes):
        notes.append("dropout: one process used the masks of the split operators, which are not torch's")
    if not model.training:
        notes.append("the model was trained in eval mode, as it was given")
    return notes
