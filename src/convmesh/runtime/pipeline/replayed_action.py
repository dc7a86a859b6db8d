"""A traced action at work: a micro-batch's forward is replayed at once, and its backward when the schedule asks for it.

Several micro-batches are between forward and backward at a time; each keeps its own values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from convmesh.gradients.local_gradients import as_gradient_of
from convmesh.ops.core.mask_seeds import CAPACITY, draw_seed
from convmesh.ops.loss.labels import note_labels
from convmesh.runtime.compiled.step_calls import StepCalls
from convmesh.runtime.compiled.step_runs import PlainRun
from convmesh.runtime.compiled.traced_graph import Holdings, with_values
from convmesh.runtime.pipeline.stage_modules import StageModule
from convmesh.runtime.pipeline.traced_action import MicroBatch, TracedAction

Gradients = list[torch.Tensor | None]


class ActionRun:
    """A micro-batch between its forward and the end of its backward."""

    def __init__(self, run: PlainRun, calls: StepCalls, wire: torch.device, sources: int) -> None:
        self._run, self._calls, self._wire, self._sources = run, calls, wire, sources
        self._next = 0
        self._found: Gradients = [None] * len(calls.gradients)
        self.tangents: list[torch.Tensor] = []
        """The gradients that backward begins with."""
        self.is_whole = True
        """Whether backward computes all gradients at once."""

    def backward(self) -> Gradients:
        """The gradients that are asked for now; None for the others."""
        gradients, pieces = self._found, len(self._calls.pieces)
        last = pieces if self.is_whole else min(self._next + 1, pieces)
        while self._next < last:
            ready = self._run.gradients(self._next, *self.tangents)
            for place, gradient in zip(self._calls.pieces[self._next].gradients, ready, strict=True):
                gradients[place] = gradient.to(self._wire) if place < self._sources else gradient
            self._next += 1
        self.tangents = []
        # A schedule holds losses, and so their runs, for a step; a single piece has found what is asked for next, too.
        is_over = self.is_whole or last == pieces > 1
        self._found = [None if is_over or place < self._sources else g for place, g in enumerate(gradients)]
        return gradients


class ReplayedAction:
    """Runs a stage by replaying its calls on the tensors that its layers hold now."""

    def __init__(self, traced: TracedAction, calls: StepCalls, holdings: Holdings, stage: StageModule) -> None:
        self._traced, self._calls, self._holdings, self._stage = traced, calls, holdings, stage
        self._device = stage.mesh.device
        self._results = int(traced.has_loss) + len(stage.examples[1])
        self._no_seeds = torch.zeros(CAPACITY, dtype=torch.int64, device=self._device)

    def __call__(self, chunk: MicroBatch) -> tuple[list[torch.Tensor], ActionRun]:
        """The loss, on the last stage, and the packed outputs."""
        held = self._holdings.tensors()
        _, batch = chunk.tensors(self._device)
        run = PlainRun(self._calls, [self._seeds(), *self._holdings.shards(), *batch], self._stage.mesh)
        results = list(run.results)
        note_labels(with_values(self._traced.notes, iter(results[self._results :])))
        action = ActionRun(run, self._calls, self._stage.wire, len(self._traced.sources))
        leaves = [chunk.given[i] for i in self._traced.sources] + [held[i] for i in self._traced.learning]
        return self._linked(action, results[: self._results], leaves), action

    def _linked(self, run: ActionRun, results: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results as a schedule takes them: on the device that messages leave from, as a function of `leaves`."""
        losses = [loss.clone() for loss in results[: int(self._traced.has_loss)]]
        flats = [flat.to(self._stage.wire) for flat in results[len(losses) :]]
        if not torch.is_grad_enabled():
            return [*losses, *flats]
        ends = losses or [flat for flat in flats if flat.is_floating_point()]
        # What leaves a stage has a gradient, even if no weight learns.
        link = _Leaves.apply(run, torch.zeros((), device=self._device, requires_grad=True), *leaves)
        outputs: tuple[torch.Tensor, ...] = _Ends.apply(run, link, len(ends), *losses, *flats)
        return list(outputs)

    def _seeds(self) -> torch.Tensor:
        """The seeds that the eager stage would draw for this micro-batch."""
        masks = self._traced.graph.masks
        if not masks:
            return self._no_seeds
        with self._stage.seeded():
            drawn = [draw_seed(self._stage.mesh) for _ in range(masks)]
        return torch.tensor(drawn + [0] * (CAPACITY - masks)).to(self._device)


class _Leaves(torch.autograd.Function):
    """Where backward ends: replays a part of it, or all, for the stage's inputs and weights.

    A separate node with one result: schedules that compute gradients of weights later start again from it, and torch
    2.11 starts only from a node's first result.
    """

    @staticmethod
    def forward(ctx: Any, run: ActionRun, anchor: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.leaves = run, leaves
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, link: torch.Tensor) -> tuple[Any, ...]:
        del link
        pairs = zip(ctx.leaves, ctx.run.backward(), strict=True)
        return None, None, *(g if g is None else as_gradient_of(leaf, g) for leaf, g in pairs)


class _Ends(torch.autograd.Function):
    """Where backward begins: hands on what forward computed, and takes the gradients of the first `ends` floats."""

    @staticmethod
    def forward(ctx: Any, run: ActionRun, link: torch.Tensor, ends: int, *results: torch.Tensor) -> Any:
        ctx.run, ctx.device = run, link.device
        ctx.ends = [i for i, t in enumerate(results) if t.is_floating_point()][:ends]
        handed = tuple(t.detach() for t in results)
        ctx.mark_non_differentiable(*(t for i, t in enumerate(handed) if i not in ctx.ends))
        return handed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[Any, ...]:
        ctx.run.tangents = [tangents[i].to(ctx.device) for i in ctx.ends]
        return None, torch.zeros((), device=ctx.device), None, *(None for _ in tangents)
