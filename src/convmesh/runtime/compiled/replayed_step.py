"""A traced step at work: forward replays up to the loss, and `loss.backward()` replays the rest, piece by piece."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from convmesh.dist import OpenMesh
from convmesh.errors import ConvMeshError
from convmesh.gradients.local_gradients import as_gradient_of, local_of
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.elementwise.mask_seeds import CAPACITY, draw_seed
from convmesh.ops.loss.labels import note_labels
from convmesh.runtime.compiled.step_calls import StepCall, StepCalls, Values, replay
from convmesh.runtime.compiled.traced_step import Holdings, Nested, TracedStep, with_values


class ReplayedStep:
    """Runs a step by replaying its calls on the tensors that the network holds now."""

    def __init__(self, traced: TracedStep, calls: StepCalls, holdings: Holdings, mesh: OpenMesh) -> None:
        self._traced, self._calls, self._holdings, self._mesh = traced, calls, holdings, mesh
        self._seeds = torch.zeros(CAPACITY, dtype=torch.int64, device=mesh.device)

    def __call__(self, inputs: list[Sharded], targets: Any) -> tuple[torch.Tensor, Any]:
        """The loss and the outputs, as the network's engine gives them."""
        held = self._holdings.tensors()
        _, batch = Nested.of((inputs, targets))
        given = [self._draw(), *(local_of(t) for t in held), *(t.detach() for t in batch)]
        values: Values = dict(zip(self._calls.inputs, given, strict=True))
        with torch.no_grad():
            _replayed(self._calls.forward, values, self._mesh)
        found = iter([values[place] for place in self._calls.results])
        loss = next(found)
        outputs = self._traced.outputs.filled(found)
        note_labels(with_values(self._traced.notes, found))
        return self._with_backward(loss, held, values), outputs

    def _draw(self) -> torch.Tensor:
        """Fresh seeds, those that an eager step would draw; while a user captures the step, those of the one before."""
        if self._traced.masks and not _is_captured(self._seeds):
            drawn = [draw_seed(self._mesh) for _ in range(self._traced.masks)]
            self._seeds = torch.tensor(drawn + [0] * (CAPACITY - len(drawn))).to(self._mesh.device)
        return self._seeds

    def _with_backward(self, loss: torch.Tensor, held: list[torch.Tensor], values: Values) -> torch.Tensor:
        """The loss as a function of the weights, linked so that the pieces of backward run one after the other.

        Autograd delivers each piece's gradients before it goes on, so that their sums over ranks start behind the next.
        """
        run = _Run(self._calls, values, self._mesh)
        for number, piece in reversed(list(enumerate(self._calls.pieces))):
            weights = [held[self._traced.learning[i]] for i in piece.gradients]
            loss = _Piece.apply(run, number, loss, *weights)
        return loss


def _replayed(calls: list[StepCall], values: Values, mesh: OpenMesh) -> None:
    """Replay outside of autocast: the casts are in the trace, and neither operators nor the compiler may add others."""
    with torch.autocast(mesh.device.type, enabled=False):
        replay(calls, values)


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether work on a tensor's device is being captured in a CUDA graph, which nothing may enter from the host."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class _Run:
    """One step between its forward and the end of its backward."""

    def __init__(self, calls: StepCalls, values: Values, mesh: OpenMesh) -> None:
        self._calls, self._values, self._mesh = calls, values, mesh
        self._next = 0

    def gradients(self, number: int, tangent: torch.Tensor) -> list[torch.Tensor]:
        """Replay a piece of backward: the gradients that are ready after it."""
        if number != self._next:
            raise ConvMeshError(
                "backward of a compiled step ran a second time; call `backward()` once per loss, or use compile=False."
            )
        self._next += 1
        piece, values = self._calls.pieces[number], self._values
        values.setdefault(self._calls.tangent, tangent)
        _replayed(piece.calls, values, self._mesh)
        found = [values[self._calls.gradients[i]] for i in piece.gradients]
        for place in piece.frees:
            del values[place]
        if self._next == len(self._calls.pieces):
            values.clear()
        return found


class _Piece(torch.autograd.Function):
    """Passes the loss on; its backward replays one piece and passes the loss's gradient on."""

    @staticmethod
    def forward(ctx: Any, run: _Run, number: int, loss: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.number = run, number
        ctx.weights = weights
        return loss.clone()  # not a view: users divide a loss in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[Any, ...]:
        found = ctx.run.gradients(ctx.number, tangent)
        pairs = zip(ctx.weights, found, strict=True)
        return None, None, tangent, *(as_gradient_of(weight, grad) for weight, grad in pairs)
