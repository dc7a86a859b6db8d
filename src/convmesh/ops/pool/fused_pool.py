"""Max pooling in elementary operators, which a compiler merges with the activations around them.

The pool's input then need not be stored, and each winner is kept as one byte, its number in the window: torch's kernel
keeps an index of eight bytes and, just for its shape, the whole input.

    backward, in padded places q:   dx[q] = sum over a of dy[i - a] where winner[i - a] is number r + s·a,
                                    with q = s·i + r and 0 ≤ r < s, for windows that begin every s places
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from convmesh.ops.pool.pool_windows import Covered, Numbers, Pooling

MOST_PLACES = torch.iinfo(torch.int8).max
"""Places in a window whose numbers fit in a byte."""

MOST_SHARING = 4
"""Windows that share a place, at most: backward adds up one term for each."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows over the last dims, one number per dim; `extents` are the input's, `counts` the output's."""

    kernel: Numbers
    stride: Numbers
    padding: Numbers
    extents: Numbers
    counts: Numbers

    @property
    def reach(self) -> Numbers:
        """How many windows share a place."""
        return tuple(-(-k // s) for k, s in zip(self.kernel, self.stride, strict=True))

    @property
    def tiles(self) -> Numbers:
        """How many strides, rounded up, reach from the start of the padding to the end of the input."""
        each = zip(self.extents, self.padding, self.stride, strict=True)
        return tuple((p + n - 1) // s + 1 for n, p, s in each)


def windows_here(covered: Covered, pooling: Pooling) -> Windows | None:
    """This rank's windows, if they can be pooled this way."""
    counts = tuple(covered.out.shape[-pooling.dims :])
    windows = Windows(pooling.kernel, pooling.stride, covered.padding, covered.extents, counts)
    fits = math.prod(windows.kernel) <= MOST_PLACES and math.prod(windows.reach) <= MOST_SHARING
    plain = not covered.is_padded and set(pooling.dilation) == {1} and bool(covered.out.size)
    return windows if fits and plain else None


def fused_max(x: torch.Tensor, windows: Windows) -> torch.Tensor:
    """The largest value of each window; as in torch, the first of equal values wins, and NaN beats all."""
    result: torch.Tensor = _FusedMax.apply(x, windows)
    return result


class _FusedMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, windows: Windows) -> torch.Tensor:
        (_, best, seen), *others = _members(x, windows)
        winner = torch.zeros_like(best, dtype=torch.int8)
        for number, values, inside in others:
            wins = (values > best) | (values != values)
            if inside is not None and seen is not None:
                wins, seen = inside & (wins | ~seen), inside | seen
            best, winner = torch.where(wins, values, best), torch.where(wins, number, winner)
        ctx.save_for_backward(winner)
        ctx.windows = windows
        return best if others else best.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        windows, (winner,) = ctx.windows, ctx.saved_tensors
        terms = [_term(grad, winner, back, windows) for back in product(*map(range, windows.reach))]
        lead = grad.shape[: grad.dim() - len(windows.kernel)]
        whole = [t * s for t, s in zip(windows.tiles, windows.stride, strict=True)]
        padded = sum(terms[1:], terms[0]).reshape(*lead, *whole)
        edges = zip(windows.padding, windows.extents, whole, strict=True)
        return _padded(padded, [(-p, p + n - m) for p, n, m in edges], 0), None


def _term(grad: torch.Tensor, winner: torch.Tensor, back: Numbers, windows: Windows) -> torch.Tensor:
    """The gradients of windows that begin `back` strides before each tile, where a place of the tile won."""
    dims = len(back)
    edges = [(a, t - c - a) for a, t, c in zip(back, windows.tiles, windows.counts, strict=True)]
    numbers = torch.zeros((), dtype=torch.int64, device=grad.device)
    won = torch.ones((), dtype=torch.bool, device=grad.device)
    for dim, (a, s, k) in enumerate(zip(back, windows.stride, windows.kernel, strict=True)):
        place = (torch.arange(s, device=grad.device) + s * a).view(-1, *[1] * (2 * (dims - 1 - dim)))
        numbers = numbers * k + place
        won = won if s * (a + 1) <= k else won & (place < k)
    won = (_with_tiles(_padded(winner, edges, -1), dims) == numbers.to(torch.int8)) & won
    return torch.where(won, _with_tiles(_padded(grad, edges, 0), dims), 0)


def _members(x: torch.Tensor, windows: Windows) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """For each number, that place of every window, and which windows have it inside the input; None means all."""
    ends = [s * (c - 1) + k for s, c, k in zip(windows.stride, windows.counts, windows.kernel, strict=True)]
    edges = [(p, e - p - n) for p, e, n in zip(windows.padding, ends, windows.extents, strict=True)]
    padded = _padded(x, edges, 0)
    is_padded = any(number > 0 for pair in edges for number in pair)
    for number, starts in enumerate(product(*map(range, windows.kernel))):
        member, inside = padded, torch.ones((), dtype=torch.bool, device=x.device) if is_padded else None
        for i, (start, s, count) in enumerate(zip(starts, windows.stride, windows.counts, strict=True)):
            dim = x.dim() - len(starts) + i
            member = member[(slice(None),) * dim + (slice(start, start + s * (count - 1) + 1, s),)]
            if inside is not None:
                place = torch.arange(count, device=x.device) * s + (start - windows.padding[i])
                inside = inside & ((place >= 0) & (place < windows.extents[i])).view(-1, *[1] * (len(starts) - 1 - i))
        yield number, member, inside


def _with_tiles(x: torch.Tensor, dims: int) -> torch.Tensor:
    """With a dim of extent 1 after each of the last `dims`, for the places of a tile."""
    return x.reshape(*x.shape[: x.dim() - dims], *(n for extent in x.shape[x.dim() - dims :] for n in (extent, 1)))


def _padded(x: torch.Tensor, edges: Sequence[tuple[int, int]], value: int) -> torch.Tensor:
    """With places added before and after in the last dims, or removed where negative."""
    flat = [number for pair in reversed(edges) for number in pair]
    return F.pad(x, flat, value=value) if any(flat) else x
