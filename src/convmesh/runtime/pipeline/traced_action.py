"""What a stage does for a micro-batch, as a graph: forward, on the last stage the loss, and backward.

Backward is one part, or two where a schedule computes the gradients of inputs before those of weights. They are traced
from the very functions that torch's schedules call, so that transfers are those of eager stages, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from convmesh.errors import UnsupportedError
from convmesh.gradients.local_gradients import local_of
from convmesh.ops.core.mask_seeds import SeedInputs
from convmesh.ops.loss.labels import LabelNote, collecting_labels
from convmesh.private_torch.pipeline_stages import stage_backward_input, stage_backward_weight
from convmesh.runtime.compiled.layer_tags import last_traced, traced_since
from convmesh.runtime.compiled.traced_graph import Holdings, Nested, Recipe, Tensors, TracedGraph, told_of
from convmesh.runtime.pipeline.stage_loss import StageLoss
from convmesh.runtime.pipeline.stage_modules import StageModule

Gradients = Sequence[torch.Tensor | None]

_KEY = "convmesh_weights"


def is_for_weights(node: fx.Node) -> bool:
    """Whether a traced operator belongs to the second part of backward."""
    return _KEY in node.meta


@dataclass(frozen=True)
class TracedAction:
    """The graph returns the loss (on the last stage), the packed outputs and the label notes; then gradients."""

    graph: TracedGraph
    sources: tuple[int, ...]
    """Which of the stage's inputs have a gradient; these gradients come first."""
    learning: tuple[int, ...]
    """Which of the held tensors have one."""
    notes: list[LabelNote]
    """With tensors of the trace; a replay fills in its own."""
    has_loss: bool


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch as a stage sees it."""

    given: Sequence[torch.Tensor]
    target: Any = None
    """Where the stage computes the loss."""

    def tensors(self, device: torch.device) -> tuple[Nested, list[torch.Tensor]]:
        """Its structure, and its tensors where the stage computes."""
        structure, tensors = Nested.of((list(self.given), self.target))
        return structure, [tensor.detach().to(device) for tensor in tensors]


class ActionRecipe(Recipe):
    """A stage's forward and backward for one micro-batch."""

    def __init__(self, stage: StageModule, loss: StageLoss | None, holdings: Holdings, chunk: MicroBatch, splits: bool):
        self._structure, batch = chunk.tensors(stage.mesh.device)
        super().__init__(holdings, _tangents(stage, loss), batch)
        self._stage, self._loss, self._splits = stage, loss, splits
        self._wanted = [tensor.requires_grad for tensor in chunk.given]
        self._sources: tuple[int, ...] = ()
        self._learning: tuple[int, ...] = ()
        self._notes: list[LabelNote] = []

    def described(self, graph: TracedGraph) -> TracedAction:
        """The action, after it was traced."""
        return TracedAction(graph, self._sources, self._learning, self._notes, self._loss is not None)

    def run(
        self, parts: list[torch.Tensor], batch: list[torch.Tensor], tangents: Tensors, drawn: SeedInputs
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        given, target = self._structure.filled(iter(batch))
        sources = [x.detach().requires_grad_(wanted) for x, wanted in zip(given, self._wanted, strict=True)]
        outputs = self._stage.run(sources, self._stage.mesh.device)
        ends = [] if self._loss is None else [self._whole(outputs, target, drawn)]
        results = [t.detach() for t in (*ends, *outputs, *told_of(self._notes))]
        if not tangents:
            return results, []
        ends = [end for end in (ends or outputs) if end.requires_grad]
        return results, self._backward(ends, tangents, sources, parts)

    def _whole(self, outputs: Tensors, target: Any, drawn: SeedInputs) -> torch.Tensor:
        assert self._loss is not None
        before = drawn.used
        with collecting_labels() as self._notes:
            whole = self._loss.whole(outputs, target)
        if drawn.used != before:  # eager losses draw from a sequence of their own
            raise UnsupportedError("the loss draws random masks")
        return whole

    def _backward(
        self, ends: list[torch.Tensor], tangents: Tensors, sources: list[torch.Tensor], parts: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        if len(ends) != len(tangents):
            raise UnsupportedError("the loss of a micro-batch does not depend on what learns")
        starts = [tangent.to(end.dtype).reshape(end.shape) for tangent, end in zip(tangents, ends, strict=True)]
        asked = [i for i, source in enumerate(sources) if source.requires_grad]
        wanted = [sources[i] for i in asked]
        learning = [i for i, part in enumerate(parts) if part.requires_grad]
        weights = [parts[i] for i in learning]
        with torch.autocast(self._stage.mesh.device.type, enabled=False):  # as schedules run backward
            if self._splits and wanted and weights:
                of_sources, of_weights = self._in_two_parts(ends, starts, wanted, weights)
            elif wanted or weights:
                gradients = torch.autograd.grad(ends, [*wanted, *weights], starts, allow_unused=True)
                of_sources, of_weights = gradients[: len(wanted)], gradients[len(wanted) :]
            else:
                return []
        self._sources = tuple(i for i, grad in zip(asked, of_sources, strict=True) if grad is not None)
        self._learning = tuple(i for i, grad in zip(learning, of_weights, strict=True) if grad is not None)
        return [local_of(grad) for grad in (*of_sources, *of_weights) if grad is not None]

    def _in_two_parts(
        self, ends: list[torch.Tensor], starts: list[torch.Tensor], wanted: list[torch.Tensor], parts: Tensors
    ) -> tuple[Gradients, Gradients]:
        cut_off = [end.clone() for end in ends]  # which views do not allow
        kept = [end.grad_fn for end in cut_off]  # or torch 2.11 loses the functions that weight gradients start from
        weights = [weight for weight in self._stage.parameters() if weight.requires_grad]
        of_sources, groups = stage_backward_input(cut_off, starts, wanted, iter(weights))
        border = last_traced()
        stage_backward_weight(iter(weights), [group for group in groups if "grads" in group])
        kept.clear()
        for node in traced_since(border):
            node.meta[_KEY] = True
        return of_sources, [part.grad for part in parts]


def _tangents(stage: StageModule, loss: StageLoss | None) -> list[torch.Tensor]:
    """The gradients that backward is given: that of the loss, or those of what the next stage takes."""
    if not torch.is_grad_enabled():
        return []
    return [torch.empty((), device="meta")] if loss is not None else [t for t in stage.examples[1] if t.requires_grad]
