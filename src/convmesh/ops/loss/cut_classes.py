"""Losses over cut classes, such as a vocabulary: three values per position are summed over ranks; no score travels.

Each rank computes its part of the sum of exponentials, and the target class's score if it holds that class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from convmesh.dist import all_reduce, sum_over
from convmesh.layout import Layout
from convmesh.ops.core.across_ranks import Along
from convmesh.ops.core.precision import wide
from convmesh.ops.core.sharded import Sharded

VALUES_SUMMED = 3
"""Per position: the largest score, the sum of exponentials, the target's score."""


def stay_cut(layout: Layout) -> bool:
    """Whether the sums move less than gathering the scores of dim 1 would."""
    axes = layout.cuts[1].axes
    return bool(axes) and layout.shape[1] > VALUES_SUMMED * layout.mesh.extent(axes)


def log_probabilities(
    x: Sharded, labels: torch.Tensor, factors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Those of the target classes; with `factors`, one per class, also the sum over all classes times their factors."""
    here = x.box.spans[1].slice()
    mine = None if factors is None else factors[here].view(-1, *[1] * (x.dim() - 2))
    total = None if factors is None else factors.sum()
    along = Along((1,), x.mesh, x.layout.axes_of([1]))
    results: tuple[torch.Tensor, torch.Tensor] = _LogProbability.apply(x.local, labels, here.start, along, mine, total)
    return results[0], None if factors is None else results[1]


def scores_of(x: Sharded, labels: torch.Tensor) -> torch.Tensor:
    """The target classes' scores."""
    held, place = _place(x.local, labels, x.box.spans[1].start)
    return sum_over(_picked(x.local, held, place), x.mesh, x.layout.axes_of([1])).squeeze(1)


def _place(scores: torch.Tensor, labels: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels are classes of this rank, and their places here."""
    places = labels.unsqueeze(1) - first
    held = (places >= 0) & (places < scores.shape[1])
    return held, places.where(held, 0)


def _picked(scores: torch.Tensor, held: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    if not scores.shape[1]:
        return scores.sum(1, keepdim=True)  # zeros that depend on the scores
    return scores.gather(1, place).where(held, 0)


class _LogProbability(torch.autograd.Function):
    """One pass over the scores in each direction; backward sends nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        labels: torch.Tensor,
        first: int,
        along: Along,
        factors: torch.Tensor | None,
        total: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wider = x.to(wide(x.dtype))
        largest = along.max(wider)
        shifted = wider - largest
        held, place = _place(x, labels, first)
        parts = [_picked(shifted, held, place)]
        if factors is not None:
            parts.append((shifted * factors).sum(1, keepdim=True))
        parts.append(shifted.exp_().sum(1, keepdim=True))
        picked, *weighted, powers = all_reduce(torch.cat(parts, 1), along.mesh, along.axes).split(1, 1)
        logarithm = powers.log()
        ctx.save_for_backward(x, largest + logarithm, held, place, factors, total)
        every = weighted[0] - logarithm * total if factors is not None else logarithm
        return (picked - logarithm).squeeze(1).to(x.dtype), every.squeeze(1).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, grad_every: torch.Tensor) -> tuple[Any, ...]:
        x, logarithm, held, place, factors, total = ctx.saved_tensors
        own, every = (g.unsqueeze(1).to(logarithm.dtype) for g in (grad, grad_every))
        likely = (x - logarithm).exp_()
        result = likely.mul_(-own if factors is None else -own - every * total)
        if factors is not None:
            result.add_(every * factors)
        if x.shape[1]:
            result.scatter_add_(1, place, own.expand_as(place).where(held, 0))
        return result.to(x.dtype), None, None, None, None, None
