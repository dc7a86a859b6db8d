"""The split convolution as an autograd function: interior work runs while halos travel, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from convmesh.dist import OpenMesh, Reduction
from convmesh.dist.exchange import Arrived, Pieces, add_arrived, start
from convmesh.kernels.conv import ConvParams, convolution, convolution_backward, in_best_format
from convmesh.layout import Box, ExchangePlan, Region
from convmesh.layout.terms import Term, Terms
from convmesh.ops.border import pad_dims, unpad_dims
from convmesh.ops.local_layers import Pads, constant, term_call


@dataclass(frozen=True)
class SplitConv:
    """Everything about one rank's part of a split convolution that does not change from step to step."""

    mesh: OpenMesh
    plan: ExchangePlan
    terms: Terms
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    out: Box
    """This rank's output box, samples and channels included."""
    reduce_axes: tuple[str, ...]
    """The axes that cut the work: weight gradients are summed over them."""

    def call(self, term: Term) -> tuple[ConvParams, Pads]:
        return term_call(term, self.stride, self.dilation, self.groups)

    def source_region(self, term: Term) -> Region:
        """The input that a term reads, with all samples and channels that this rank needs."""
        return Region((*self.plan.needed.dims[:2], *((s,) if s.extent else () for s in term.source.spans)))


class SplitConvFunction(torch.autograd.Function):
    """Forward: post halos, convolve what is here, add the halos' terms. Backward: post the halos' gradients, find the
    weight's gradient, post its sum, find the input's own gradient, add what arrives."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, split: SplitConv
    ) -> torch.Tensor:
        plan = split.plan
        transfer = start(split.mesh, plan.forward, plan.carrier, plan.group_axes, Pieces([(plan.held, x)], x))
        x = in_best_format(x, weight)  # once: backward reads the same copy
        y = _own_term(split, x, weight, bias)
        arrived = transfer.wait()
        y = _late_terms(split, y, x, weight, bias, arrived)
        ctx.split, ctx.arrived_regions = split, [region for region, _ in arrived]
        ctx.save_for_backward(x, weight, *(values for _, values in arrived))
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, *values = ctx.saved_tensors
        split: SplitConv = ctx.split
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        dy = in_best_format(dy, weight)
        inputs = _Inputs(split, x, list(zip(ctx.arrived_regions, values, strict=True)))
        dw = torch.zeros_like(weight) if wants_w else None
        halo_grads = [_late_backward(inputs, term, dy, weight, dw, wants_x) for term in split.terms.late]
        transfer = _send_back(split, [g for g in halo_grads if g], dy) if wants_x else None
        if wants_w and dw is not None:
            _own_weight_gradient(inputs, dy, weight, dw)
        sums = _post_sums(split, dw, dy.sum([0, *range(2, dy.dim())]) if wants_b else None)
        dx = None
        if wants_x and transfer is not None:
            dx = _own_input_gradient(inputs, dy, weight, [g for g in halo_grads if g])
            add_arrived(split.plan, dx, transfer.wait())
        reduced = iter(sums.wait() if sums else ())
        return dx, next(reduced) if wants_w else None, next(reduced) if wants_b else None, None


class _Inputs:
    """The input of any term, from what this rank held and what arrived."""

    def __init__(self, split: SplitConv, x: torch.Tensor, arrived: Arrived) -> None:
        self.split = split
        self._pieces = Pieces([(split.plan.held, x), *arrived], x)

    def of(self, term: Term, pads: Pads) -> torch.Tensor:
        return pad_dims(self._pieces.gather(self.split.source_region(term)), pads)


def _own_term(
    split: SplitConv, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    if split.terms.own is None:
        return None
    return _apply(_Inputs(split, x, []), split.terms.own, weight, bias)


def _late_terms(
    split: SplitConv,
    y: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    arrived: Arrived,
) -> torch.Tensor:
    inputs = _Inputs(split, x, arrived)
    for term in split.terms.late:
        if y is None:
            y = _apply(inputs, term, weight, bias)
        else:
            _outputs(split, term, y).add_(_apply(inputs, term, _taps(weight, term), None))
    return y if y is not None else constant(split.out.shape, x, bias)


def _apply(inputs: _Inputs, term: Term, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    params, pads = inputs.split.call(term)
    return convolution(inputs.of(term, pads), weight, bias, params)


def _late_backward(
    inputs: _Inputs, term: Term, dy: torch.Tensor, weight: torch.Tensor, dw: torch.Tensor | None, wants_x: bool
) -> tuple[Region, torch.Tensor] | None:
    """Add a term's part of the weight's gradient; give its part of the input's."""
    params, pads = inputs.split.call(term)
    source = inputs.of(term, pads)
    near = _outputs(inputs.split, term, dy)
    dx, dw_taps = convolution_backward(near, source, _taps(weight, term), params, (wants_x, dw is not None))
    if dw is not None and dw_taps is not None:
        _taps(dw, term).add_(dw_taps)
    if dx is None:
        return None
    return inputs.split.source_region(term), unpad_dims(dx, pads)


def _own_weight_gradient(inputs: _Inputs, dy: torch.Tensor, weight: torch.Tensor, dw: torch.Tensor) -> None:
    own = inputs.split.terms.own
    if own is not None:
        params, pads = inputs.split.call(own)
        _, found = convolution_backward(dy, inputs.of(own, pads), weight, params, (False, True))
        assert found is not None
        dw.add_(found)


def _own_input_gradient(
    inputs: _Inputs, dy: torch.Tensor, weight: torch.Tensor, late: list[tuple[Region, torch.Tensor]]
) -> torch.Tensor:
    """The gradient of what this rank holds, as far as its own outputs give it."""
    split = inputs.split
    own = split.terms.own
    pieces = list(late)
    if own is not None:
        params, pads = split.call(own)
        found, _ = convolution_backward(dy, inputs.of(own, pads), weight, params, (True, False))
        assert found is not None
        pieces = [(split.source_region(own), unpad_dims(found, pads))]
    return Pieces(pieces, dy).gather(split.plan.held)


def _send_back(split: SplitConv, grads: list[tuple[Region, torch.Tensor]], like: torch.Tensor) -> Any:
    plan = split.plan
    return start(split.mesh, plan.adjoint, plan.adjoint_carrier, plan.group_axes, Pieces(grads, like))


def _post_sums(split: SplitConv, *grads: torch.Tensor | None) -> Reduction | None:
    present = [g for g in grads if g is not None]
    return Reduction(present, split.mesh, split.reduce_axes) if present else None


def _outputs(split: SplitConv, term: Term, y: torch.Tensor) -> torch.Tensor:
    """The outputs that a term touches."""
    near = term.out.relative_to(Box(split.out.spans[2:]))
    return y[(slice(None), slice(None), *near.slices())]


def _taps(weight: torch.Tensor, term: Term) -> torch.Tensor:
    return weight[(slice(None), slice(None), *term.taps.slices())]
