"""The split convolution as an autograd function: interior work runs while halos travel, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from convmesh.dist import OpenMesh, Reduction
from convmesh.dist.exchange import Arrived, PendingExchange, Pieces, add_arrived, start
from convmesh.dist.wire import Slices
from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.local_conv import convolution, convolution_backward, in_format_for
from convmesh.layout import Box, ExchangePlan, Region
from convmesh.layout.terms import Term, Terms
from convmesh.ops.channels.local_layers import Pads, constant, term_call
from convmesh.ops.core.padding import pad_dims, unpad_dims

_ALL = (slice(None), slice(None))  # samples and channels


@dataclass(frozen=True)
class Part:
    """One term as this rank computes it."""

    params: ConvParams
    pads: Pads
    """Padding added to its input before the kernel's own."""
    source: Region
    """The input that it reads, with all samples and channels that this rank needs."""
    outputs: Slices
    """The part of this rank's output that it adds to."""
    taps: Slices


@dataclass(frozen=True)
class SplitConv:
    """Everything about one rank's part of a split convolution that does not change from step to step."""

    plan: ExchangePlan
    own: Part | None
    late: tuple[Part, ...]
    out: Box
    """This rank's output box, samples and channels included."""
    kind: str
    """The kind of device whose kernels run."""

    @cached_property
    def plain(self) -> ConvParams | None:
        """The arguments of the one ordinary convolution that this amounts to if nothing travels on any rank."""
        travels = (self.plan.carrier, self.plan.adjoint_carrier) != ("none", "none")
        if travels or self.own is None or self.late or any(low or high for low, high in self.own.pads):
            return None
        return self.own.params


def split_conv(
    plan: ExchangePlan,
    terms: Terms,
    out: Box,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    kind: str,
) -> SplitConv:
    """A rank's part, from its terms and the exchange that fetches what they read."""

    def part(term: Term) -> Part:
        params, pads = term_call(term, stride, dilation, groups)
        source = Region((*plan.needed.dims[:2], *((s,) if s.extent else () for s in term.source.spans)))
        near = term.out.relative_to(Box(out.spans[2:]))
        return Part(params, pads, source, (*_ALL, *near.slices()), (*_ALL, *term.taps.slices()))

    return SplitConv(plan, part(terms.own) if terms.own else None, tuple(map(part, terms.late)), out, kind)


class SplitConvFunction(torch.autograd.Function):
    """Forward: post halos, convolve what is here, add the halos' terms. Backward: post the halos' gradients, compute
    the weight's gradient, post its sum, compute the input's own gradient, add what arrives."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        split: SplitConv,
        mesh: OpenMesh,
        reduce_axes: tuple[str, ...],
    ) -> torch.Tensor:
        plan = split.plan
        transfer = start(mesh, plan.forward, plan.carrier, plan.group_axes, Pieces([(plan.held, x)], x))
        x = in_format_for(x, x, weight, split.kind)  # once: backward reads the same copy
        y = None if split.own is None else _apply(split, x, [], split.own, weight, bias)
        arrived = transfer.wait()
        y = _late_terms(split, y, x, weight, bias, arrived)
        ctx.split, ctx.mesh, ctx.reduce_axes = split, mesh, reduce_axes
        ctx.arrived_regions = [region for region, _ in arrived]
        ctx.save_for_backward(x, weight, *(values for _, values in arrived))
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, *values = ctx.saved_tensors
        split: SplitConv = ctx.split
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        dy = in_format_for(dy, x, weight, split.kind)
        back = _Backward(split, x, list(zip(ctx.arrived_regions, values, strict=True)), dy, weight)
        halos = back.halos(wants_x, wants_w)
        transfer = _send_back(ctx.mesh, split.plan, halos, dy) if wants_x else None
        dw = back.of_weight() if wants_w else None
        sums = _post_sums(ctx, dw, dy.sum([0, *range(2, dy.dim())]) if wants_b else None)
        dx = None
        if wants_x and transfer is not None:
            dx = back.of_input(halos)
            add_arrived(ctx.mesh, split.plan, dx, transfer.wait())
        reduced = iter(sums.wait() if sums else ())
        return dx, next(reduced) if wants_w else None, next(reduced) if wants_b else None, None, None, None


def _apply(
    split: SplitConv, x: torch.Tensor, arrived: Arrived, part: Part, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    source = Pieces([(split.plan.held, x), *arrived], x).gather(part.source)
    return convolution(pad_dims(source, part.pads), weight, bias, part.params, split.kind)


def _late_terms(
    split: SplitConv,
    y: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    arrived: Arrived,
) -> torch.Tensor:
    for part in split.late:
        if y is None:
            y = _apply(split, x, arrived, part, weight, bias)
        else:
            y[part.outputs].add_(_apply(split, x, arrived, part, weight[part.taps], None))
    return y if y is not None else constant(split.out.shape, x, bias)


class _Backward:
    """The gradients of one rank: first those of halos, which others wait for, then the rest."""

    def __init__(
        self, split: SplitConv, x: torch.Tensor, arrived: Arrived, dy: torch.Tensor, weight: torch.Tensor
    ) -> None:
        self.split, self.dy, self.weight = split, dy, weight
        self._inputs = Pieces([(split.plan.held, x), *arrived], x)
        self._of_taps: list[tuple[Part, torch.Tensor]] = []
        self._read_last: tuple[Part, torch.Tensor] | None = None

    def halos(self, wants_x: bool, wants_w: bool) -> Arrived:
        """The gradients of what late terms read; those of their taps are kept for `of_weight`.

        A single term that covers everything is as large as the layer: its weight's gradient waits until halos travel.
        """
        gradients = []
        for part in self.split.late:
            dx, dw = self._gradients(part, (wants_x, wants_w and self.split.own is not None))
            if dx is not None:
                gradients.append((part.source, dx))
            if dw is not None:
                self._of_taps.append((part, dw))
        return gradients

    def of_weight(self) -> torch.Tensor:
        whole = next((part for part in (self.split.own, *self.split.late) if part is not None), None)
        dw = torch.zeros_like(self.weight) if whole is None else self._gradients(whole, (False, True))[1]
        assert dw is not None
        for part, gradient in self._of_taps:
            dw[part.taps].add_(gradient)
        return dw

    def of_input(self, halos: Arrived) -> torch.Tensor:
        """The part of the gradient of what this rank holds that comes from its own outputs."""
        own, pieces = self.split.own, halos
        if own is not None:
            dx, _ = self._gradients(own, (True, False))
            assert dx is not None
            pieces = [(own.source, dx)]
        return Pieces(pieces, self.dy).gather(self.split.plan.held)

    def _gradients(self, part: Part, wanted: tuple[bool, bool]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not any(wanted):
            return None, None
        source = self._source(part)
        near, taps = self.dy[part.outputs], self.weight[part.taps]
        dx, dw = convolution_backward(near, source, taps, part.params, wanted, self.split.kind)
        return None if dx is None else unpad_dims(dx, part.pads), dw

    def _source(self, part: Part) -> torch.Tensor:
        """What a part reads; kept, since a term that covers everything computes its gradients one by one."""
        if self._read_last is None or self._read_last[0] is not part:
            self._read_last = part, pad_dims(self._inputs.gather(part.source), part.pads)
        return self._read_last[1]


def _send_back(mesh: OpenMesh, plan: ExchangePlan, halos: Arrived, like: torch.Tensor) -> PendingExchange:
    return start(mesh, plan.adjoint, plan.adjoint_carrier, plan.group_axes, Pieces(halos, like))


def _post_sums(ctx: Any, *grads: torch.Tensor | None) -> Reduction | None:
    present = [g for g in grads if g is not None]
    return Reduction(present, ctx.mesh, ctx.reduce_axes) if present else None
