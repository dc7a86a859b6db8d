"""A training step as a graph: from the batch to the loss, and back to the gradients of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from convmesh.gradients.local_gradients import local_of
from convmesh.ops.core.mask_seeds import SeedInputs
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.loss.labels import LabelNote, collecting_labels
from convmesh.runtime.compiled.layer_tags import LayerTags
from convmesh.runtime.compiled.traced_graph import Holdings, Nested, Recipe, Tensors, TracedGraph, told_of, trace_graph
from convmesh.runtime.direct_engine import DirectEngine, judged
from convmesh.runtime.layer_following import followed


@dataclass(frozen=True)
class TracedStep:
    """The graph returns the loss, a flag for finite outputs, and the label notes; then gradients."""

    graph: TracedGraph
    learning: tuple[int, ...]
    """Which of the held tensors have a gradient."""
    notes: list[LabelNote]
    """With tensors of the trace; a replay fills in its own."""


class _Step(Recipe):
    def __init__(
        self, engine: DirectEngine, holdings: Holdings, inputs: list[Sharded], targets: Any, backward: bool
    ) -> None:
        self._structure, batch = Nested.of((inputs, targets))
        super().__init__(holdings, [torch.empty((), device="meta")], batch)
        self._engine, self._backward = engine, backward
        self.learning: tuple[int, ...] = ()
        self.notes: list[LabelNote] = []

    def run(
        self, parts: list[torch.Tensor], batch: list[torch.Tensor], tangents: Tensors, drawn: SeedInputs
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        del drawn
        inputs, targets = self._structure.filled(iter(batch))
        with collecting_labels() as self.notes:
            loss, outputs = self._engine.step(inputs, targets)
        # Before backward begins: forward ends with the last of them.
        results = [t.detach() for t in (loss, judged(outputs).finite, *told_of(self.notes))]
        gradients = self._gradients(loss, parts, tangents[0]) if self._backward and loss.requires_grad else []
        return results, gradients

    def _gradients(self, loss: torch.Tensor, parts: list[torch.Tensor], tangent: torch.Tensor) -> list[torch.Tensor]:
        asked = [i for i, part in enumerate(parts) if part.requires_grad]
        with torch.autocast(tangent.device.type, enabled=False):  # `backward` is called outside of it
            given = tangent.to(loss.dtype).reshape(loss.shape)
            gradients = torch.autograd.grad(loss, [parts[i] for i in asked], given, allow_unused=True)
        self.learning = tuple(i for i, grad in zip(asked, gradients, strict=True) if grad is not None)
        return [local_of(grad) for grad in gradients if grad is not None]


def trace_step(
    engine: DirectEngine, holdings: Holdings, inputs: list[Sharded], targets: Any, fuse: bool, backward: bool
) -> TracedStep:
    """The step on this rank's shards, for batches of this kind."""
    recipe = _Step(engine, holdings, inputs, targets, backward)
    following = followed(engine, [engine.module], engine.layers, LayerTags())
    graph = trace_graph(recipe, engine.mesh.device, following, fuse)
    return TracedStep(graph, recipe.learning, recipe.notes)
