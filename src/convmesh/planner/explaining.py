"""What a strategy does to one layer: the layer is planned and lowered as a network would be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from convmesh.dist import dry_mesh
from convmesh.errors import PlanError
from convmesh.layout import Box, Layout, Mesh
from convmesh.lowering.gradient_sums import with_sums
from convmesh.lowering.lower import lower_plan
from convmesh.lowering.lowered import Lowered
from convmesh.oracle import Prediction, predict_programs
from convmesh.oracle.explain import Explanation, LayerShares, LayerSpec, volumes
from convmesh.oracle.explain.pictures import Tensor
from convmesh.oracle.explain.strategy_terms import limit, sharing
from convmesh.oracle.memory.peak import memory_of
from convmesh.planner.planning import plan
from convmesh.planner.predicting import predict, representatives
from convmesh.plans import Plan, Program, Split, Step, Transfer
from convmesh.system import System

BEFORE, LAYER, AFTER = "before", "layer", "after"
_CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def explain(
    strategy: str, layer: LayerSpec, mesh: Mesh, algorithm: str = "auto", system: System | None = None
) -> Explanation:
    """Pictures, formulas and numbers; `algorithm` is x, y or w where the strategy cuts channels."""
    shared = sharing(strategy, layer, mesh, algorithm)
    made = _planned(strategy, layer, shared, system)
    rank, device = _shown_rank(mesh), system.torch_device if system else "cuda"
    program = _alone(lower_plan(made, rank, device), made)
    return Explanation(
        strategy=strategy,
        layer=layer,
        shared=shared,
        rank=rank,
        tensors=_tensors(layer, shared, made, device),
        volumes=tuple(volumes(layer if shared.stages == 1 else layer.following, shared, rank)),
        sent=_sent(program),
        bytes_weights=program.bytes_weights,
        bytes_memory=memory_of(program).bytes_peak,
        limit=limit(strategy, layer, shared.algorithm),
        microbatches=made.pipeline.microbatches if made.pipeline else 1,
        alternatives=_alternatives(strategy, layer, shared, rank),
        prediction=_predicted(made, program, system) if system else None,
    )


def _predicted(made: Plan, program: Program, system: System) -> Prediction:
    """The layer's time alone; in a pipeline, that of all stages, which wait for each other."""
    return predict(made, system) if made.pipeline else predict_programs({program.rank: program}, system)


def _shown_rank(mesh: Mesh) -> int:
    """A rank in the middle of space, and of a pipeline: such ranks send most."""
    ranks = representatives(mesh)
    return ranks[len(ranks) // 2]


def _planned(strategy: str, layer: LayerSpec, shared: LayerShares, system: System | None) -> Plan:
    net, sample = _network(strategy, layer, shared.stages)
    made = plan(net, sample, shared.mesh, strategy if shared.algorithm != "w" else _grid(shared), system=system)
    if shared.algorithm and not shared.by_samples:
        chosen: Any = shared.algorithm
        split = replace(made.split(LAYER), algorithm=chosen)
        made = plan(net, sample, shared.mesh, {**dict(made.splits), LAYER: split}, system=system)
    if made.pipeline is not None:
        starts = tuple(f"{AFTER}{number}" for number in range(1, shared.stages))
        staged = replace(made, pipeline=replace(made.pipeline, starts=starts))
        made = plan(net, sample, shared.mesh, staged, system=system)
    return made


def _grid(shared: LayerShares) -> dict[str, Split]:
    """Channels cut by two axes, which no preset does."""
    return {"*": Split(sample=shared.sample, channel=shared.kept + shared.gathered)}


def _network(strategy: str, layer: LayerSpec, stages: int) -> tuple[nn.Module, tuple[int, ...]]:
    """The layer after one that makes its input, so that x arrives cut as it would in a network, and learns.

    In a pipeline, one more layer follows for each further stage; it preserves the shape of the layer's output.
    """
    with torch.device("meta"):
        net = nn.Sequential()
        before, sample = _before(layer, dense_after_space=strategy == "hybrid")
        net.add_module(BEFORE, before)
        net.add_module(LAYER, _module(layer))
        for number in range(1, stages):
            net.add_module(f"{AFTER}{number}", _module(layer.following))
    return net, sample


def _before(layer: LayerSpec, dense_after_space: bool) -> tuple[nn.Module, tuple[int, ...]]:
    """A layer with one weight a channel; a convolution where dense layers are cut differently from convolutions."""
    if layer.kind == "conv":
        convolution = _CONVOLUTIONS[len(layer.space) - 1]
        return convolution(1, layer.channels, 1, bias=False), (layer.samples, 1, *layer.space)
    if dense_after_space:
        return nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), nn.Flatten()), (layer.samples, 1, layer.channels)
    return nn.Linear(1, layer.channels, bias=False), (layer.samples, 1)


def _module(layer: LayerSpec) -> Any:
    if layer.kind == "linear":
        return nn.Linear(layer.channels, layer.filters, bias=False)
    convolution = _CONVOLUTIONS[len(layer.space) - 1]
    return convolution(layer.channels, layer.filters, layer.kernel, layer.stride, layer.padding, bias=False)


def _alone(lowered: Lowered, made: Plan) -> Program:
    """The program of the layer without the one before it; in a pipeline that of the rank's stage."""
    program, mesh = lowered.program, dry_mesh(made.mesh, lowered.program.rank, lowered.device)
    if made.pipeline is not None:
        return program
    nodes = tuple(node for node in program.nodes if node.layer == LAYER)
    weights = tuple(weight for weight in program.weights if weight.name.startswith(f"{LAYER}."))
    sums = {weight.name: weight.sum_axes for weight in weights if weight.sum_axes}
    alone = replace(program, nodes=nodes, weights=weights, buckets=())
    return with_sums(alone, sums, mesh, made.summing)


def _sent(program: Program) -> dict[str, int]:
    """Bytes that a step sends, by phase."""
    return {
        "forward": program.repeats * sum(_bytes(node.forward) for node in program.nodes),
        "backward": program.repeats * sum(_bytes(node.backward) for node in program.nodes),
        "reduction": _bytes(program.reduction),
    }


def _bytes(steps: Iterable[Step]) -> int:
    return sum(step.bytes_sent for step in steps if isinstance(step, Transfer))


def _alternatives(strategy: str, layer: LayerSpec, shared: LayerShares, rank: int) -> dict[str, int]:
    """Where channels are cut: what the same ranks would send under each algorithm."""
    if not shared.algorithm or shared.by_samples:
        return {}
    data, ranks = shared.ranks(shared.sample), shared.ranks(shared.kept + shared.gathered)
    meshes = {"x": Mesh(data=data, channel=ranks), "y": Mesh(data=data, filter=ranks)}
    if root := next((n for n in range(int(ranks**0.5), 1, -1) if ranks % n == 0), 0):
        meshes["w"] = Mesh(data=data, channel=root, filter=ranks // root)
    bytes_by_name: dict[str, int] = {}
    for name, mesh in meshes.items():
        with contextlib.suppress(PlanError):  # a layer with few channels has no stationary-x
            bytes_by_name[name] = sum(v.bytes_sent for v in volumes(layer, sharing(strategy, layer, mesh, name), rank))
    return bytes_by_name


def _tensors(layer: LayerSpec, shared: LayerShares, made: Plan, device: str) -> tuple[Tensor, ...]:
    """x, w and y with what every rank holds of them, as the lowered plan has it."""
    mesh = made.mesh
    dims = "NC" + "DHW"[3 - len(layer.space) :]
    halo = (False, False, *(dim in shared.space and k > 1 for dim, k in enumerate(layer.kernel)))
    if shared.stages > 1:
        return (_staged(layer, shared),)
    program = lower_plan(made, device=device).program
    node = next(node for node in program.nodes if node.layer == LAYER)
    return (
        Tensor("x", dims, layer.given, _boxes(node.inputs[0], mesh), halo),
        Tensor("w", "FC" + "KKK"[: len(layer.kernel)], layer.weight, _weight_boxes(program)),
        Tensor("y", dims, layer.made, _boxes(node.outputs[0], mesh)),
    )


def _boxes(layout: Layout, mesh: Mesh) -> tuple[Box, ...]:
    return tuple(layout.box(rank) for rank in range(mesh.size))


def _weight_boxes(program: Program) -> tuple[Box, ...]:
    weight = next(w for w in program.weights if w.name == f"{LAYER}.weight")
    return _boxes(Layout.of(program.mesh, weight.shape, dict(weight.cuts)), program.mesh)


def _staged(layer: LayerSpec, shared: LayerShares) -> Tensor:
    """A pipeline's layers as one tensor of layers, cut by stages and, with data, samples."""
    cut: dict[int, tuple[str, ...]] = {0: ("pipe",)} | ({1: shared.sample} if shared.sample else {})
    layout = Layout.of(shared.mesh, (shared.stages, layer.samples), cut)
    return Tensor("layers and samples", "LN", layout.shape, _boxes(layout, shared.mesh))
