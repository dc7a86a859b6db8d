"""A tensor as rows whose statistics are shared by groups of rows: the one form of batch, group, instance, layer norm.

Torch's normalisation kernels work on N×C×… and give every channel one block of threads, so a large volume with few
channels leaves most of a GPU idle. Rows are pieces of channels: as many as keep the device busy, with the same kernels.
On CPUs those for channels-last tensors add up each channel's float32 values one by one, as many channels at a time as
there are; there every index of the last dim gets rows of its own, which are side by side in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from convmesh.dist.wire import memory_format_of
from convmesh.kernels import norm_shapes as _norm_shapes  # noqa: F401 - tells torch about tensors without data
from convmesh.ops.core.precision import wide
from convmesh.ops.norm.moments import Population, moments_of_parts

ENOUGH_ROWS = 512
SHORTEST_ROW = 1024
LARGE_CHANNEL = 32768
"""Values for which one block of threads takes longer than the calls that more rows cost."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`values` has its rows in dim 1: `shape` = (samples, groups, members) of them, alike along the dims in `shared`.

    Statistics, and values a row, are stacked: their first dim counts different ones, e.g. mean and variance.
    """

    values: torch.Tensor
    shape: tuple[int, int, int]
    shared: tuple[int, ...]
    interleaved: bool = False
    """Whether neighbours in memory belong to different rows."""

    @property
    def length(self) -> int:
        """The values of one row."""
        return self.values.numel() // max(1, self.values.shape[1])

    def total(self, per_row: torch.Tensor) -> torch.Tensor:
        """Sums over the rows that share a statistic, in float64."""
        listed = per_row.double().view(per_row.shape[0], *self.shape)
        return listed.sum([1 + dim for dim in self.shared], keepdim=True)

    def spread(self, statistics: torch.Tensor) -> torch.Tensor:
        """Each row's own statistic, in the type that kernels take beside `values`."""
        typed = statistics.to(wide(self.values.dtype))
        return typed.expand(-1, *self.shape).reshape(typed.shape[0], self.values.shape[1])

    def along(self, per_row: torch.Tensor) -> torch.Tensor:
        """A value a row, to broadcast over `values`."""
        return per_row.view(1, -1, *[1] * (self.values.dim() - 2))

    def restored(self, result: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A result of the form of `values` as a tensor of the shape that the rows were made of."""
        if not self.interleaved:
            return result.view(shape)
        samples, channels, *space = shape
        return result.movedim(1, -1).view(samples, *space, channels).movedim(-1, 1)


def rows_of_channels(x: torch.Tensor, kind: str) -> Rows:
    """N×C×…, with statistics over all samples, for kernels of a `kind` of device."""
    samples, channels = x.shape[:2]
    if _suits_interleaving(x, kind):
        return Rows(_interleaved(x), (x.shape[-1], channels, 1), (0, 2), interleaved=True)
    length = math.prod(x.shape[2:])
    small = length < SHORTEST_ROW or samples * length < LARGE_CHANNEL
    if small or memory_format_of(x) != torch.contiguous_format:
        return Rows(x.contiguous(memory_format=memory_format_of(x)), (1, channels, 1), (0, 2))
    members = pieces(samples * channels, length)
    values = x.contiguous().view(1, samples * channels * members, length // members)
    return Rows(values, (samples, channels, members), (0, 2))


def rows_of_groups(x: torch.Tensor, samples: int, groups: int, channels: int, kind: str) -> Rows:
    """samples×(groups·channels)×…, with statistics for each sample and group of so many channels."""
    if samples == 1 and x.dim() > 2 and x.shape[:2] == (1, groups * channels) and _suits_interleaving(x, kind):
        return Rows(_interleaved(x), (x.shape[-1], groups, channels), (0, 2), interleaved=True)
    length = x.numel() // max(1, samples * groups * channels)
    members = channels * pieces(samples * groups * channels, length)
    values = x.contiguous().view(1, samples * groups * members, -1 if x.numel() else 0)
    return Rows(values, (samples, groups, members), (2,))


def _suits_interleaving(x: torch.Tensor, kind: str) -> bool:
    return kind == "cpu" and x.numel() > 0 and memory_format_of(x) != torch.contiguous_format


def _interleaved(x: torch.Tensor) -> torch.Tensor:
    """A channels-last tensor with a row for each channel and index of the last dim: a view, channels-last too."""
    samples, channels, *_, last = x.shape
    return x.movedim(1, -1).view(samples, -1, 1, last * channels).movedim(-1, 1)


@cache
def pieces(rows: int, length: int) -> int:
    """Into how many equal pieces to cut rows, so that there are enough and none is short."""
    most = min(ENOUGH_ROWS // max(1, rows), length // SHORTEST_ROW)
    return next((n for n in range(most, 1, -1) if length % n == 0), 1)


def statistics(rows: Rows, population: Population) -> torch.Tensor:
    """The moments of the whole population; not differentiable."""
    values = rows.values.detach()
    if values.numel():
        parts = _row_moments(values, population.mesh.device_kind(values))
    else:
        parts = values.new_zeros(2, values.shape[1], dtype=torch.float64)
    shared = [1 + dim for dim in rows.shared]
    return moments_of_parts(parts.view(2, *rows.shape), shared, rows.length, population)


def _row_moments(values: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "cuda":
        return torch.stack(torch.batch_norm_update_stats(values, None, None, 0.0)).double()
    if not values.is_contiguous():
        # Torch's channels-last kernel adds up float32 values one by one and loses four digits when the mean is not 0.
        dims = (0, *range(2, values.dim()))
        values = values.to(wide(values.dtype))
        mean = values.mean(dims, keepdim=True)
        return torch.stack([mean.flatten(), (values - mean).square_().mean(dims)]).double()
    # The kernel on CPUs types its results after these two; it does not change them with a momentum of 0.
    scratch = values.new_zeros(2, values.shape[1], dtype=wide(values.dtype))
    return torch.stack(torch.batch_norm_update_stats(values, scratch[0], scratch[1], 0.0)).double()
