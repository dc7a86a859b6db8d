"""A smaller run with the same verdict: fewer ranks on every axis, fewer samples, smaller extents."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from convmesh.errors import ConvMeshError
from convmesh.graph import Captured, Graph, capture
from convmesh.graph.checking.small_batches import activations, halved
from convmesh.layout import Mesh
from convmesh.lowering.lower import lower
from convmesh.plans import Pipeline, Plan, Split, split_nodes
from convmesh.verification.drawn_batch import without_data
from convmesh.verification.result import Shapes

ENOUGH = 1 << 20
"""Activations that train in moments: there is no need to shrink further."""

LEAST_STATISTICS = 16
"""Values per channel in a batch norm: statistics of fewer amplify rounding errors."""

Samples = tuple[torch.Tensor | tuple[int, ...], ...]


def smaller_mesh(mesh: Mesh, most_ranks: int) -> Mesh:
    """The same axes with at most `most_ranks` ranks: the longest is halved first, and axes keep 2 ranks if possible."""
    axes = dict(mesh.axes)
    while math.prod(axes.values()) > most_ranks:
        name = max((n for n in axes), key=lambda n: (axes[n], n != "pipe"))
        axes[name] = max(2, axes[name] // 2) if axes[name] > 2 else 1
    kept = {name: parts for name, parts in mesh.shares.items() if axes[name] == mesh.axes[name]}
    return Mesh(**axes).with_shares(**kept)


def on_mesh(plan: Plan, mesh: Mesh) -> Plan:
    """The plan on a mesh with fewer ranks or axes."""
    if mesh == plan.mesh:
        return plan
    splits = tuple((layer, _split_on(split, mesh)) for layer, split in plan.splits)
    return replace(plan, mesh=mesh, splits=splits, pipeline=_fewer_stages(plan, mesh))


def _split_on(split: Split, mesh: Mesh) -> Split:
    """A layer that loses one of its two channel axes has its algorithm chosen again."""
    kept = split.on(mesh)
    return kept if kept.channel == split.channel else replace(kept, algorithm="auto")


def _fewer_stages(plan: Plan, mesh: Mesh) -> Pipeline | None:
    was, now = plan.mesh.axes.get("pipe", 1), mesh.axes.get("pipe", 1)
    if plan.pipeline is None or was == now:
        return plan.pipeline
    if now == 1:
        return None
    stages = [*plan.pipeline.starts]
    kept = max(1, (len(stages) + 1) * now // was - 1)
    step = (len(stages) + 1) / (kept + 1)
    return replace(plan.pipeline, starts=tuple(stages[round(step * (i + 1)) - 1] for i in range(kept)))


class Shrinker:
    """Halves shapes while the network and the plan allow it."""

    def __init__(self, model: nn.Module, samples: Samples, plan: Plan, captured: Captured) -> None:
        self._model, self._samples, self._plan = model, samples, plan
        self._first = captured
        self.captured = captured
        self.shapes: Shapes = tuple(node.outputs[0].shape for node in captured.graph.inputs)

    def run(self) -> None:
        """Set `captured` and `shapes` to the smallest capture that is large enough, and to its inputs' shapes."""
        dims = max((len(shape) for shape in self.shapes), default=0)
        for chosen in ({0}, {*range(2, dims)}, *({dim} for dim in range(2, dims))):
            while chosen and activations(self.captured.graph) > ENOUGH and self._try(halved(self.shapes, chosen)):
                pass

    def _try(self, shapes: Shapes) -> bool:
        if shapes == self.shapes:
            return False
        try:
            captured = capture_quietly(self._model, self._samples, shapes)
            if captured.graph.signature != self._first.graph.signature or not self._keeps_cuts(captured.graph):
                return False
            lower(captured, self._plan)
        except (ConvMeshError, RuntimeError, ValueError):  # too small for the network, or for the plan
            return False
        self.captured, self.shapes = captured, shapes
        return True

    def _keeps_cuts(self, graph: Graph) -> bool:
        """Whether every rank still has a row of each dim that the plan cuts, and batch norms enough values."""
        pairs = zip(_extents(self._first.graph), _extents(graph), strict=True)
        return all(self._keeps(layer, kind, old, new) for (layer, kind, old), (_, _, new) in pairs)

    def _keeps(self, layer: str, kind: str, old: Shapes, new: Shapes) -> bool:
        split = self._plan.split(layer)
        for before, after in zip(old, new, strict=True):
            for dim, axes in split.cut(len(before), kind == "linear").items():
                ranks = self._plan.mesh.extent(axes)
                if ranks > 1 and after[dim] < min(before[dim], ranks):
                    return False
            if kind == "batch_norm" and _statistics(after) < min(_statistics(before), LEAST_STATISTICS):
                return False
        return True


def capture_quietly(
    model: nn.Module, samples: Samples, shapes: Shapes, floats: torch.dtype = torch.float64
) -> Captured:
    """Capture without warnings, since the result's notes repeat them."""
    pairs = zip(samples, shapes, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(model, *(without_data(s, shape, floats) for s, shape in pairs), check=False)


def _extents(graph: Graph) -> Iterator[tuple[str, str, Shapes]]:
    shapes = {node.name: node.outputs[0].shape for node in graph.nodes if node.outputs}
    for node in split_nodes(graph):
        yield node.layer, node.kind, (shapes[node.inputs[0]], node.outputs[0].shape)


def _statistics(shape: tuple[int, ...]) -> int:
    return math.prod(shape) // shape[1] if len(shape) > 1 and shape[1] else 0
