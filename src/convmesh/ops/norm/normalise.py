"""Normalisation with statistics of the whole global tensor.

    y = w · x̂ + b        x̂ = (x - mean) · s        s = 1 / √(variance + eps)
    dx = s · (w·dy - avg(w·dy) - x̂ · avg(w·dy·x̂))

Both averages run over all values behind a statistic, on all ranks: one all-reduce in each direction. Only `x` and small
statistics are kept for the backward pass, never a normalised copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from convmesh.kernels.memory_format import memory_format_of
from convmesh.ops.core.empty_result import empty_result
from convmesh.ops.norm.moments import Population
from convmesh.ops.norm.rows import Rows

Params = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Normaliser:
    """The settings of a normalisation. `even_weights`: rows that share a statistic also share a weight."""

    population: Population
    eps: float
    even_weights: bool = True


def normalise(rows: Rows, moments: torch.Tensor, params: Params, how: Normaliser) -> torch.Tensor:
    """`rows.values` normalised with their own moments, scaled and shifted by `params` (one value per row)."""
    result: torch.Tensor = _Normalise.apply(rows.values, *params, rows, moments, how)
    return result


def apply_moments(rows: Rows, mean: torch.Tensor, variance: torch.Tensor, params: Params, eps: float) -> torch.Tensor:
    """`rows.values` normalised with the given moments, one value per row."""
    if not rows.values.numel():
        return empty_result(rows.values, rows.values.shape, *params).to(rows.values.dtype)
    weight, bias = (None if p is None else p.to(mean.dtype) for p in params)
    return F.batch_norm(rows.values, mean, variance, weight, bias, training=False, eps=eps)


def per_row(param: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor | None:
    """A per-channel parameter, repeated for the rows of `shape` = (samples, channels, pieces)."""
    if param is None or shape[0] == shape[2] == 1:
        return param
    return param.view(1, -1, 1).expand(tuple(shape)).reshape(-1)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        rows: Rows,
        moments: torch.Tensor,
        how: Normaliser,
    ) -> torch.Tensor:
        of_rows = rows.spread(moments)
        ctx.save_for_backward(values, weight, of_rows)
        ctx.shape, ctx.shared, ctx.how = rows.shape, rows.shared, how
        ctx.types = [None if p is None else p.dtype for p in (weight, bias)]
        return apply_moments(rows, of_rows[0], of_rows[1], (weight, bias), how.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        values, weight, moments = ctx.saved_tensors
        back = _NormBackward(Rows(values, ctx.shape, ctx.shared), moments, weight, ctx.how, grad)
        dx = back.of_values() if ctx.needs_input_grad[0] else None
        of_weight, of_bias = ctx.types
        dw = None if of_weight is None else (back.deviations * back.inverse).to(of_weight)
        return dx, dw, None if of_bias is None else back.sums.to(of_bias), None, None, None


class _NormBackward:
    """The two passes over the gradient: sums of every row, then the gradient of the values."""

    def __init__(
        self, rows: Rows, moments: torch.Tensor, weight: torch.Tensor | None, how: Normaliser, grad: torch.Tensor
    ) -> None:
        self.rows, self.how = rows, how
        self.kind = how.population.mesh.device_kind(grad)
        self.grad = grad.contiguous(memory_format=memory_format_of(rows.values))
        self.mean, self.variance = moments
        self.inverse = (self.variance + how.eps).rsqrt_()
        self.weight = None if weight is None else weight.to(self.mean.dtype)
        self.sums, self.deviations = self._row_sums()

    def _row_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ dy and Σ dy·(x - mean) of every row."""
        if not self.grad.numel():
            return torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        grad, values, mean = self.grad, self.rows.values, self.mean
        if self.kind == "cuda":
            return torch.batch_norm_backward_reduce(grad, values, mean, self.inverse, None, True, False, False)[:2]
        backward = torch.ops.aten.native_batch_norm_backward
        ones = torch.ones_like(mean)  # in place of 1 / √variance, so that deviations are not divided by it
        _, deviations, sums = backward(grad, values, None, None, None, mean, ones, True, 0.0, [False, True, True])
        return sums, deviations

    def of_values(self) -> torch.Tensor:
        average, deviation = self._averages()
        if not self.grad.numel():
            return torch.zeros_like(self.rows.values)
        if self.kind == "cuda" and self.how.even_weights:
            # One pass by SyncBatchNorm's kernel. It would divide by a 32-bit count, so averages are passed instead.
            tensors = (self.grad, self.rows.values, self.mean, self.inverse, self.weight, average, deviation)
            return torch.batch_norm_backward_elemt(*tensors, self.mean.new_ones(1, dtype=torch.int32))
        scale = self.inverse if self.weight is None else self.inverse * self.weight
        outer = -scale if self.how.even_weights else -self.inverse
        # outer · (x̂ · avg(dy·x̂) + avg(dy)) is itself a normalisation of x with other parameters.
        params = (outer * self.inverse * deviation, outer * average)
        shifted = apply_moments(self.rows, self.mean, self.variance, params, self.how.eps)
        return shifted.addcmul_(self.grad, self.rows.along(scale))

    def _averages(self) -> torch.Tensor:
        """Averages of dy and dy·(x - mean) over the values behind each row's statistic; of w·dy for uneven weights."""
        sums = torch.stack([self.sums, self.deviations])
        if self.weight is not None and not self.how.even_weights:
            sums *= self.weight
        population = self.how.population
        return self.rows.spread(population.sum(self.rows.total(sums)).div_(population.count))
