"""Batch and instance norm in elementary operators, for a compiler: in the memory format of the input, with no copies.

    y = w · x̂ + b        x̂ = (x - mean) · s        s = 1 / √(variance + eps)
    dx = s · (w·dy - avg(w·dy) - x̂ · avg(w·dy·x̂))

Named kernels for instance norm want the plain format; these operators a compiler merges with the activations around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from convmesh.ops.core.precision import wide
from convmesh.ops.norm.moments import Population

Param = torch.Tensor | None
Moments = tuple[torch.Tensor, torch.Tensor]
"""Mean and variance, kept apart: stacking takes extra kernels, so they are stacked only to travel."""


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """The dims of a shard that statistics run over, and the population behind each statistic."""

    dims: tuple[int, ...]
    population: Population
    eps: float


def moments_here(x: torch.Tensor, how: FusedNorm) -> Moments:
    """Mean and variance of the population, with `dims` kept; not differentiable."""
    values = x.detach().to(wide(x.dtype))
    variance, mean = torch.var_mean(values, how.dims, correction=0, keepdim=True)
    if how.population.is_here:
        return mean, variance
    share = values.numel() // max(1, mean.numel()) / how.population.count
    sums = torch.stack([mean.double(), variance.double() + mean.double().square()]) * share
    average, square = how.population.sum(sums)
    return average.to(values.dtype), (square - average.square()).clamp(min=0).to(values.dtype)


def fused_norm(x: torch.Tensor, moments: Moments, weight: Param, bias: Param, how: FusedNorm) -> torch.Tensor:
    """`x` normalised by its `moments`, scaled and shifted by one value per channel."""
    result: torch.Tensor = _FusedNorm.apply(x, weight, bias, *moments, how)
    return result


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Param,
        bias: Param,
        mean: torch.Tensor,
        variance: torch.Tensor,
        how: FusedNorm,
    ) -> torch.Tensor:
        inverse = (variance + how.eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.how, ctx.types = how, [None if p is None else p.dtype for p in (weight, bias)]
        y: torch.Tensor = (x.to(mean.dtype) - mean) * inverse
        y = y if weight is None else y * _along(weight, x)
        y = y if bias is None else y + _along(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        how: FusedNorm = ctx.how
        dy, normalised = grad.to(mean.dtype), (x.to(mean.dtype) - mean) * inverse
        sums = dy.sum(how.dims, keepdim=True), (dy * normalised).sum(how.dims, keepdim=True)
        scale = inverse if weight is None else inverse * _along(weight, x)
        dx = None
        if ctx.needs_input_grad[0]:
            average, deviation = _averages(sums, how.population)
            dx = (scale * (dy - average - normalised * deviation)).to(x.dtype)
        db, dw = (each.sum(0).flatten() for each in sums)  # over samples, if each has its own statistics
        of_weight, of_bias = ctx.types
        given = None if of_weight is None else dw.to(of_weight), None if of_bias is None else db.to(of_bias)
        return dx, *given, None, None, None


def _averages(sums: Moments, population: Population) -> Sequence[torch.Tensor]:
    """The averages of dy and dy·x̂; a channel's weight is the same for all values behind a statistic."""
    if population.is_here:
        return [each / population.count for each in sums]
    return (population.sum(torch.stack(sums).double()) / population.count).to(sums[0].dtype).unbind()


def _along(param: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return param.to(wide(x.dtype)).view(1, -1, *[1] * (x.dim() - 2))
