"""A tensor as rows, groups of which share statistics: the common form of batch, group, instance and layer norm.

Torch's normalisation kernels work on N×C×… and give every channel one block of threads, so a large volume with few
channels leaves most of a GPU idle. Rows are pieces of channels, enough of them to keep the device busy with the same
kernels. On CPUs the channels-last kernels add up each channel's float32 values one by one, vectorised over channels
only; there every index of the last dim gets its own rows, which are adjacent in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from convmesh.kernels import norm_shapes as _norm_shapes  # noqa: F401 - registers meta kernels with torch
from convmesh.kernels.memory_format import memory_format_of
from convmesh.ops.core.precision import wide
from convmesh.ops.norm.moments import Population, moments_of_parts

ENOUGH_ROWS = 512
SHORTEST_ROW = 1024
LARGE_CHANNEL = 32768
"""From this many values on, one block of threads takes longer than the extra calls for more rows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`values` has `shape` = (samples, groups, members) rows in dim 1, with common statistics along `shared` dims.

    Statistics and per-row values are stacked: their first dim lists kinds, e.g. mean and variance.
    """

    values: torch.Tensor
    shape: tuple[int, int, int]
    shared: tuple[int, ...]
    interleaved: bool = False
    """Whether neighbours in memory belong to different rows."""

    @property
    def length(self) -> int:
        """Number of values in one row."""
        return self.values.numel() // max(1, self.values.shape[1])

    def total(self, per_row: torch.Tensor) -> torch.Tensor:
        """Sums over the rows that share a statistic, in float64."""
        listed = per_row.double().view(per_row.shape[0], *self.shape)
        return listed.sum([1 + dim for dim in self.shared], keepdim=True)

    def spread(self, statistics: torch.Tensor) -> torch.Tensor:
        """Each row's statistic, in the type that kernels expect with `values`."""
        typed = statistics.to(wide(self.values.dtype))
        rows = typed if typed.shape[1:] == self.shape else typed.expand(-1, *self.shape)
        return rows.reshape(typed.shape[0], self.values.shape[1])

    def along(self, per_row: torch.Tensor) -> torch.Tensor:
        """Per-row values, shaped to broadcast over `values`."""
        return per_row.view(1, -1, *[1] * (self.values.dim() - 2))

    def restored(self, result: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A result shaped like `values`, in the shape of the original tensor."""
        if not self.interleaved:
            return result if result.shape == shape else result.view(shape)
        samples, channels, *space = shape
        return result.movedim(1, -1).view(samples, *space, channels).movedim(-1, 1)


def rows_of_channels(x: torch.Tensor, kind: str) -> Rows:
    """Rows of an N×C×… tensor, with statistics over all samples, for kernels of a `kind` of device."""
    samples, channels = x.shape[:2]
    if _suits_interleaving(x, kind):
        return Rows(_interleaved(x), (x.shape[-1], channels, 1), (0, 2), interleaved=True)
    members = pieces_of_channel(tuple(x.shape), memory_format_of(x) != torch.contiguous_format)
    if not members:
        return Rows(x.contiguous(memory_format=memory_format_of(x)), (1, channels, 1), (0, 2))
    values = x.contiguous().view(1, samples * channels * members, math.prod(x.shape[2:]) // members)
    return Rows(values, (samples, channels, members), (0, 2))


def pieces_of_channel(shape: Sequence[int], channels_last: bool) -> int:
    """How many rows one sample's channel makes; 0 if a channel of all samples is one row."""
    samples, channels, *space = shape
    length = math.prod(space)
    if channels_last or length < SHORTEST_ROW or samples * length < LARGE_CHANNEL:
        return 0
    return pieces(samples * channels, length)


def has_enough_rows(x: torch.Tensor) -> bool:
    """Whether channels will do as rows: they are small, or channels-last."""
    return not pieces_of_channel(x.shape, memory_format_of(x) != torch.contiguous_format)


def rows_of_groups(x: torch.Tensor, samples: int, groups: int, channels: int, kind: str) -> Rows:
    """Rows of a samples×(groups·channels)×… tensor, with statistics for each sample and group."""
    if samples == 1 and x.dim() > 2 and x.shape[:2] == (1, groups * channels) and _suits_interleaving(x, kind):
        return Rows(_interleaved(x), (x.shape[-1], groups, channels), (0, 2), interleaved=True)
    length = x.numel() // max(1, samples * groups * channels)
    members = channels * pieces(samples * groups * channels, length)
    values = x.contiguous().view(1, samples * groups * members, -1 if x.numel() else 0)
    return Rows(values, (samples, groups, members), (2,))


def _suits_interleaving(x: torch.Tensor, kind: str) -> bool:
    return kind == "cpu" and x.numel() > 0 and memory_format_of(x) != torch.contiguous_format


def _interleaved(x: torch.Tensor) -> torch.Tensor:
    """A channels-last tensor with a row for each channel and index of the last dim: a view, also channels-last."""
    samples, channels, *_, last = x.shape
    return x.movedim(1, -1).view(samples, -1, 1, last * channels).movedim(-1, 1)


@cache
def pieces(rows: int, length: int) -> int:
    """How many equal pieces to cut each row into, for enough rows of which none is short."""
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
    # The CPU kernel takes its result type from these two; with a momentum of 0 it does not change them.
    scratch = values.new_zeros(2, values.shape[1], dtype=wide(values.dtype))
    return torch.stack(torch.batch_norm_update_stats(values, scratch[0], scratch[1], 0.0)).double()
