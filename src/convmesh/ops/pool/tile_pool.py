"""Max pooling over tiles (windows that neither overlap nor touch padding) in elementary operators, for a compiler.

It merges them with the activations around, so that what is pooled need not be stored, and remembers each winner as one
byte: torch's kernel keeps an index of eight bytes and, to learn its shape, the whole input.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from convmesh.ops.pool.pool_windows import Covered, Numbers, Pooling

MOST_VALUES = torch.iinfo(torch.int8).max
"""Values of a tile whose numbers fit in a byte."""


def has_tiles(covered: Covered, pooling: Pooling) -> bool:
    """Whether all windows on this rank are tiles."""
    fits = not pooling.ceil or all(n % k == 0 for n, k in zip(covered.extents, pooling.kernel, strict=True))
    padded = covered.is_padded or any(covered.padding)
    adjacent = pooling.kernel == pooling.stride and set(pooling.dilation) == {1}
    return fits and adjacent and not padded and math.prod(pooling.kernel) <= MOST_VALUES and bool(covered.out.size)


def tile_max(x: torch.Tensor, kernel: Numbers) -> torch.Tensor:
    """The largest value of each tile in the last dims; the first of equals, and NaN before all, as torch chooses."""
    result: torch.Tensor = _TileMax.apply(x, kernel)
    return result


class _TileMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: Numbers) -> torch.Tensor:
        first, *others = _members(x, kernel)
        best, winner = first, torch.zeros_like(first, dtype=torch.int8)
        for number, values in enumerate(others, start=1):
            wins = (values > best) | (values != values)
            best, winner = torch.where(wins, values, best), torch.where(wins, number, winner)
        ctx.save_for_backward(winner)
        ctx.kernel, ctx.extents = kernel, x.shape[-len(kernel) :]
        return best.clone() if best is first else best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        kernel, (winner,) = ctx.kernel, ctx.saved_tensors
        numbers = torch.arange(math.prod(kernel), dtype=torch.int8, device=grad.device)
        in_tiles = numbers.view([n for k in kernel for n in (1, k)])
        dx = torch.where(_with_tiles(winner, len(kernel)) == in_tiles, _with_tiles(grad, len(kernel)), 0)
        whole = [n * k for n, k in zip(grad.shape[-len(kernel) :], kernel, strict=True)]
        dx = dx.reshape(*grad.shape[: -len(kernel)], *whole)
        rest = [extra for n, m in zip(reversed(ctx.extents), reversed(whole), strict=True) for extra in (0, n - m)]
        return F.pad(dx, rest) if any(rest) else dx, None


def _members(x: torch.Tensor, kernel: Numbers) -> list[torch.Tensor]:
    """The first value of every tile, the second, and so on; what no whole tile covers is left out."""
    ends = [n // k * k for n, k in zip(x.shape[-len(kernel) :], kernel, strict=True)]
    members = []
    for starts in product(*map(range, kernel)):
        member = x
        for dim, (start, end, step) in enumerate(zip(starts, ends, kernel, strict=True), start=x.dim() - len(kernel)):
            member = member[(slice(None),) * dim + (slice(start, end, step),)]
        members.append(member)
    return members


def _with_tiles(x: torch.Tensor, dims: int) -> torch.Tensor:
    """With a dim of extent 1 behind each of the last `dims`: where the members of a tile lie."""
    return x.reshape(*x.shape[: x.dim() - dims], *(n for extent in x.shape[x.dim() - dims :] for n in (extent, 1)))
