"""A traced step at work: forward replays up to the loss, and `loss.backward()` replays the rest, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from convmesh.gradients.local_gradients import as_gradient_of
from convmesh.gradients.owners import owner_of
from convmesh.gradients.reduction import GradientReducer
from convmesh.ops.core.mask_seeds import CAPACITY, draw_seed
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.loss.labels import note_labels
from convmesh.runtime.compiled.graphed_steps import GraphedStep, GraphMemory
from convmesh.runtime.compiled.step_calls import StepCalls
from convmesh.runtime.compiled.step_graphs import Trained
from convmesh.runtime.compiled.step_runs import PlainRun, StepRun
from convmesh.runtime.compiled.traced_graph import Holdings, Nested, with_values
from convmesh.runtime.compiled.traced_step import TracedStep
from convmesh.runtime.direct_engine import JudgedOutputs


class ReplayedStep:
    """Runs a step by replaying its calls on the tensors that the network holds now."""

    def __init__(self, traced: TracedStep, calls: StepCalls, holdings: Holdings, memory: GraphMemory) -> None:
        self._traced, self._calls, self._holdings, self._mesh = traced, calls, holdings, memory.mesh
        self._graphed = GraphedStep(calls, memory)
        self._seeds = torch.zeros(CAPACITY, dtype=torch.int64, device=self._mesh.device)

    def __call__(self, inputs: list[Sharded], targets: Any) -> tuple[torch.Tensor, JudgedOutputs]:
        """The loss, and whether the outputs are finite."""
        held = self._holdings.tensors()
        _, batch = Nested.of((inputs, targets))
        weights = [held[place] for place in self._traced.learning]
        run = self._begin(batch, weights)
        results = iter(run.results)
        loss = next(results)
        outputs = JudgedOutputs(next(results))
        note_labels(with_values(self._traced.notes, results))
        return self._with_backward(loss, weights, run), outputs

    def _begin(self, batch: list[torch.Tensor], weights: list[torch.Tensor]) -> StepRun:
        held = self._holdings.shards()
        given = [self._draw(), *held, *(t.detach() for t in batch)]
        learning = {*self._traced.learning}
        buffers = [t for place, t in enumerate(held) if place not in learning]
        run = self._graphed.begin(given, range(1, 1 + len(held)), Trained(weights, buffers))
        return PlainRun(self._calls, given, self._mesh) if run is None else run

    def _draw(self) -> torch.Tensor:
        """Fresh seeds, as an eager step would draw them; while a user captures the step, those of the step before."""
        if self._traced.graph.masks and not _is_captured(self._seeds):
            drawn = [draw_seed(self._mesh) for _ in range(self._traced.graph.masks)]
            self._seeds = torch.tensor(drawn + [0] * (CAPACITY - len(drawn))).to(self._mesh.device)
        return self._seeds

    def _with_backward(self, loss: torch.Tensor, weights: list[torch.Tensor], run: StepRun) -> torch.Tensor:
        """The loss as a function of the weights, linked so that the pieces of backward run one after the other.

        Autograd delivers each piece's gradients before it goes on, so the next piece overlaps their sums over ranks.
        """
        for number, piece in reversed(list(enumerate(self._calls.pieces))):
            loss = _Piece.apply(run, number, loss, *(weights[i] for i in piece.gradients))
        return loss


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether work on a tensor's device is being captured in a CUDA graph, into which the host may copy nothing."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class _Piece(torch.autograd.Function):
    """Passes the loss on; its backward replays one piece and passes the loss's gradient on."""

    @staticmethod
    def forward(ctx: Any, run: StepRun, number: int, loss: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.number = run, number
        ctx.weights = weights
        return loss.clone()  # not a view: users divide a loss in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[Any, ...]:
        gradients = ctx.run.gradients(ctx.number, tangent)
        return None, None, tangent, *_left_to_autograd(ctx.weights, gradients)


def _left_to_autograd(
    weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor | None]:
    """The gradients that their weights' reducer did not take.

    They are aliases, which autograd takes as they are; it would copy a tensor that something else holds.
    """
    owner = owner_of(weights[0]) if weights else None
    is_taken = owner.deliver(weights, gradients) if isinstance(owner, GradientReducer) else [False] * len(weights)
    for weight, gradient, is_gone in zip(weights, gradients, is_taken, strict=True):
        yield None if is_gone else as_gradient_of(weight, gradient.detach().to(weight.dtype))
