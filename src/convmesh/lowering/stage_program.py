"""The program of one rank of a pipeline: its stages' nodes for one micro-batch, and what crosses between stages."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from convmesh.dist import OpenMesh
from convmesh.errors import PlanError
from convmesh.graph import Graph
from convmesh.lowering.gradient_sums import with_sums
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.mesh_view import with_peers
from convmesh.lowering.recorder import recorded
from convmesh.plans import Held, NodeProgram, Pipeline, Saved, Transfer
from convmesh.plans.pipeline_rules import own_stages, rank_of
from convmesh.plans.program import WeightProgram
from convmesh.plans.stage_graph import StageGraph

CARRIER = "stage"


def microbatch(graph: Graph, pipeline: Pipeline) -> int:
    """Samples of one micro-batch of the batch that the network was captured for, over all ranks."""
    batches = {node.outputs[0].shape[:1] for node in graph.inputs}
    if len(batches) != 1 or () in batches:
        raise PlanError(
            f"a pipeline cuts batches, but the inputs have {sorted(batches)} samples; give them equal numbers."
        )
    ((samples,),) = batches
    if samples % pipeline.microbatches:
        raise PlanError(_uneven(pipeline.microbatches, samples, 1))
    return samples // pipeline.microbatches


def _uneven(microbatches: int, samples: int, ranks: int) -> str:
    share = samples // ranks
    fitting = [n for n in range(1, share + 1) if samples % (n * ranks) == 0]
    near = min(fitting, key=lambda n: abs(n - microbatches)) if fitting else None
    over = f" over {ranks} ranks" if ranks > 1 else ""
    fix = f"use {near}" if near else f"use a batch that is a multiple of {ranks}"
    return f"`microbatches` (={microbatches}) must cut {samples} samples{over} into equal parts; {fix}."


def stages_by_node(graph: Graph, pipeline: Pipeline) -> dict[str, int]:
    """The stage in which each call runs; inputs belong to the first."""
    row = StageGraph.of(graph)
    spans = itertools.pairwise(row.bounds(pipeline.starts))
    return {node.name: stage for stage, (begin, end) in enumerate(spans) for node in row.calls[begin:end]}


def on_stage(lowered: Lowered, graph: Graph, mesh: OpenMesh) -> Lowered:
    """A lowering of all layers, with the program of this rank's stages alone.

    `lowered` may be for another stage's rank, at this rank's place along the other axes.
    """
    pipeline = lowered.plan.pipeline
    assert pipeline is not None
    _check_samples(lowered, graph, pipeline, mesh)
    row = StageGraph.of(graph)
    bounds, mine = row.bounds(pipeline.starts), own_stages(pipeline, mesh.mesh, mesh.rank)
    stage_of = row.stage_weights(bounds)
    weights = tuple(weight for weight in lowered.program.weights if stage_of[weight.name] in mine)
    sums = {name: axes for name, axes in lowered.sum_axes.items() if stage_of[name] in mine}
    program = replace(
        lowered.program,
        rank=mesh.rank,
        nodes=tuple(node for stage in mine for node in _stage_nodes(lowered, row, bounds, stage, mesh)),
        weights=weights,
        stage=mine[0],
        repeats=pipeline.microbatches,
        stages=len(bounds) - 1,
        schedule=pipeline.schedule,
    )
    return replace(lowered, program=with_sums(program, sums, mesh, lowered.plan.summing))


def _shifted(node: NodeProgram, shift: int) -> NodeProgram:
    """The node on another stage's rank: its peers move along the pipe axis with it."""
    forward, backward = (with_peers(steps, lambda peer: peer + shift) for steps in (node.forward, node.backward))
    moves = forward is not node.forward or backward is not node.backward
    return replace(node, forward=forward, backward=backward) if moves else node


def _check_samples(lowered: Lowered, graph: Graph, pipeline: Pipeline, mesh: OpenMesh) -> None:
    for node in graph.inputs:
        layout = lowered.layouts[node.name][0]
        ranks = mesh.mesh.extent(layout.cuts[0].axes)
        if pipeline.microbatches > 1 and layout.shape[0] % ranks:
            raise PlanError(_uneven(pipeline.microbatches, layout.shape[0] * pipeline.microbatches, ranks))


def _stage_nodes(
    lowered: Lowered, row: StageGraph, bounds: Sequence[int], stage: int, mesh: OpenMesh
) -> list[NodeProgram]:
    """A stage's nodes between what it receives, whose gradients it sends back, and what it sends."""
    pipeline = lowered.plan.pipeline
    assert pipeline is not None
    begin, end = bounds[stage], bounds[stage + 1]
    inputs = [node for node in lowered.program.nodes if stage == 0 and node.node not in row.place]
    own = (n for n in lowered.program.nodes if begin <= row.place.get(n.node, -1) < end)
    nodes = [_shifted(node, mesh.rank - lowered.program.rank) for node in (*inputs, *own)]
    if stage > 0:
        back = _sent(lowered, row.crossing(begin), rank_of(stage - 1, mesh.mesh, mesh.rank), mesh)
        nodes.insert(0, _boundary(f"stage_{stage}_receives", stage, (), back))
    if stage < len(bounds) - 2:
        onward = _sent(lowered, row.crossing(end), rank_of(stage + 1, mesh.mesh, mesh.rank), mesh)
        nodes.append(_boundary(f"stage_{stage}_sends", stage, onward, (), row.crossing(end)))
    learning = (weight for weight in lowered.program.weights if weight.learns and pipeline.microbatches > 1)
    weights = {weight.name: weight for weight in learning}
    return [replace(_accumulating(node, weights, mesh), stage=stage) for node in nodes]


def _accumulating(node: NodeProgram, weights: Mapping[str, WeightProgram], mesh: OpenMesh) -> NodeProgram:
    """A node that adds its weights' gradients to earlier micro-batches'; this counts one addition too many a step."""
    added = [name for name in node.weights if name in weights]
    if not added:
        return node
    with recorded(mesh) as steps:
        for name in added:
            gradient = torch.empty(weights[name].local_shape, dtype=getattr(torch, weights[name].dtype), device="meta")
            gradient.add_(torch.empty_like(gradient))
    last = node.weight_steps + len(steps) if node.weight_steps else 0
    return replace(node, backward=(*node.backward, *steps), weight_steps=last)


def _boundary(
    name: str,
    stage: int,
    forward: tuple[Transfer, ...],
    backward: tuple[Transfer, ...],
    sources: Sequence[str] = (),
) -> NodeProgram:
    """What is sent is a copy that lives until its gradient is back, as it came; what is sent back is one for now."""
    onward, back = (sum(transfer.bytes_sent for transfer in sent) for sent in (forward, backward))
    copy = (Saved("output", 0, onward),) if forward else ()
    held = Held(onward, back, outputs=copy, gradients=copy * len(sources))
    layer = f"stage {stage}"
    return NodeProgram(
        name, layer, (), (), (), forward, backward, saved=copy, sources=tuple(sources), held=held, stage=stage
    )


def _sent(lowered: Lowered, names: Sequence[str], peer: int, mesh: OpenMesh) -> tuple[Transfer, ...]:
    """One message per type: values that cross travel side by side."""
    elements: Counter[torch.dtype] = Counter()
    for name in names:
        elements[lowered.dtypes[name]] += math.prod(lowered.layouts[name][0].box(mesh.rank).shape)
    return tuple(Transfer(CARRIER, ("pipe",), count * dtype.itemsize, peer) for dtype, count in elements.items())
