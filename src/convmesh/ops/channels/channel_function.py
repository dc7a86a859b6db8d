"""A layer with cut channels as an autograd function: gather, compute, sum-scatter; backward does the reverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from convmesh.dist import OpenMesh, Reduction, all_reduce
from convmesh.dist.exchange import PendingExchange, Pieces, accumulate, fetch, start
from convmesh.layout import ExchangePlan

Wanted = tuple[bool, bool]


class LocalLayer(Protocol):
    """A layer on one rank's part of input, weight and output: linear in input and in weight."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """This rank's part of the output, or of its sum."""

    def input_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class CutLayer:
    """One rank's part of a layer with cut channels, fixed from step to step."""

    mesh: OpenMesh
    local: LocalLayer
    inputs: ExchangePlan
    """Forward: the channels (and halos) to gather. Adjoint: their gradients, summed back."""
    outputs: ExchangePlan
    """Adjoint: partial outputs, summed to their owners. Forward: the gradients to gather."""
    reduce_axes: tuple[str, ...]
    """The axes along which ranks hold the same weight but different samples or space."""
    has_bias_duty: bool
    """Whether this rank adds the bias: one of the ranks whose partial outputs are summed does."""
    keeps_gathered: bool
    """Whether the gathered input is kept for backward, or gathered again to save its memory."""
    wire: torch.memory_format
    """The memory format in which tensors travel: that of the local layer."""
    dim: int = 1
    """The dim of the channels."""
    input_sums: tuple[str, ...] = ()
    """The axes along which ranks have the same input, so its gradient is summed for all of them."""
    output_sums: tuple[str, ...] = ()
    """The axes along which partial outputs are summed for all ranks."""

    def bias_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        return dy.sum([other for other in range(dy.dim()) if other != self.dim])


class CutLayerFunction(torch.autograd.Function):
    """Backward posts the input's gradient before it computes the weight's, to hide the transfer."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: CutLayer
    ) -> torch.Tensor:
        gathered = _gather(layer, layer.inputs, x)
        partial = layer.local.forward(gathered, weight, bias if layer.has_bias_duty else None)
        y = _sum_scatter(layer, layer.outputs, partial)
        ctx.layer = layer
        ctx.save_for_backward(gathered if layer.keeps_gathered else x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        layer: CutLayer = ctx.layer
        saved, weight = ctx.saved_tensors
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        x = saved if layer.keeps_gathered else _gather(layer, layer.inputs, saved)
        dy = _gather(layer, layer.outputs, dy)
        dx_part = layer.local.input_gradient(dy, x, weight) if wants_x else None
        returning = None if dx_part is None else _Returning(layer, dx_part)
        grads = [layer.local.weight_gradient(dy, x, weight)] if wants_w else []
        grads += [layer.bias_gradient(dy)] if wants_b else []
        sums = Reduction(grads, layer.mesh, layer.reduce_axes) if grads else None
        dx = None if returning is None else returning.wait()
        reduced = iter(sums.wait() if sums else ())
        return dx, next(reduced) if wants_w else None, next(reduced) if wants_b else None, None


class _Returning:
    """An input's gradient under way: summed where ranks have the same input, then sent to its owners."""

    def __init__(self, layer: CutLayer, partial: torch.Tensor) -> None:
        self._layer, self._partial = layer, partial
        self._sum = Reduction([partial], layer.mesh, layer.input_sums) if layer.input_sums else None
        self._sent = None if self._sum else post_partial(layer, layer.inputs, partial)

    def wait(self) -> torch.Tensor:
        layer, partial, sent = self._layer, self._partial, self._sent
        if self._sum is not None:
            (partial,) = self._sum.wait()
            sent = post_partial(layer, layer.inputs, partial)
        assert sent is not None
        return accumulate(layer.mesh, layer.inputs, partial, sent.wait())


def post_partial(layer: CutLayer, plan: ExchangePlan, partial: torch.Tensor) -> PendingExchange:
    """Post partial sums to their owners."""
    payload = Pieces([(plan.frame, partial)], partial, layer.wire)
    return start(layer.mesh, plan.adjoint, plan.adjoint_carrier, plan.group_axes, payload)


def _gather(layer: CutLayer, plan: ExchangePlan, tensor: torch.Tensor) -> torch.Tensor:
    return fetch(layer.mesh, plan, tensor.contiguous(memory_format=layer.wire), layer.wire)


def _sum_scatter(layer: CutLayer, plan: ExchangePlan, partial: torch.Tensor) -> torch.Tensor:
    partial = partial.contiguous(memory_format=layer.wire)
    if layer.output_sums:
        partial = all_reduce(partial, layer.mesh, layer.output_sums)
    return accumulate(layer.mesh, plan, partial, post_partial(layer, plan, partial).wait())
