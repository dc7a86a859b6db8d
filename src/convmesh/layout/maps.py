"""Output span → input spans, per dim, for every operator.

An operator is split by stating, for each of its dims, which input indices an output span needs. Halo widths, multi-hop
halos, uneven, thin and empty shards all follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from convmesh.layout.borders import PaddingMode, fold
from convmesh.layout.box import Box, Span, merge
from convmesh.layout.demand import KEPT, Demand, DimDemand
from convmesh.layout.layout import Cut, Layout


class DimMap(Protocol):
    """How one dim of an operator's output depends on one dim of its input."""

    def out_extent(self, extent: int) -> int:
        """The output's extent for an input of `extent`."""

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        """The indices of an input of `extent` that a non-empty `out` needs: sorted, disjoint, inside the input."""

    def __hash__(self) -> int:
        """A map is a value, so results derived from it can be cached."""


@dataclass(frozen=True, slots=True)
class Same:
    """Index `o` needs index `o`: elementwise work, and dims an operator does not touch."""

    def out_extent(self, extent: int) -> int:
        return extent

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        del extent
        return (out,)


@dataclass(frozen=True, slots=True)
class Whole:
    """Every output index needs the whole dim, as in a dense layer's contracted dim; `out` is the output's extent."""

    out: int

    def out_extent(self, extent: int) -> int:
        del extent
        return self.out

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        del out
        return merge([Span(0, extent)])


@dataclass(frozen=True, slots=True)
class Window:
    """Convolution and pooling: output `o` reads `o * stride - low + tap * dilation` for each tap of the kernel."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    low: int = 0
    high: int = 0
    mode: PaddingMode = "zeros"
    ceil: bool = False

    @property
    def reach(self) -> int:
        """Input indices from a window's first tap to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def out_extent(self, extent: int) -> int:
        room = extent + self.low + self.high - self.reach
        last = (-(-room // self.stride) if self.ceil else room // self.stride) * self.stride
        if self.ceil and last >= extent + self.low:
            last -= self.stride  # torch keeps a partial window only if it starts inside the input or its low padding
        return max(0, last // self.stride + 1)

    def extended(self, out: Span) -> Span:
        """The indices under the windows of `out`, including those beyond the borders."""
        return Span(out.start * self.stride - self.low, (out.stop - 1) * self.stride - self.low + self.reach)

    def frame(self, out: Span, extent: int) -> Span:
        """The indices of a zero-padded input from the first to the last under the windows of `out`."""
        return self.extended(out).intersect(Span(0, extent)) if out.extent else Span(0, 0)

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        if self.mode == "zeros" and self.stride == 1 and out.extent < self.dilation:
            # Between the taps of a dilated kernel lie indices that no output of a thin box reads.
            taps = (out.shift(tap * self.dilation - self.low) for tap in range(self.kernel))
            return merge(tap.intersect(Span(0, extent)) for tap in taps)
        return _sources(self.extended(out), extent, self.mode)


@dataclass(frozen=True, slots=True)
class Transposed:
    """Transposed convolution: input `i` writes to `i * stride - padding + tap * dilation` for each tap."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    output_padding: int = 0

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def out_extent(self, extent: int) -> int:
        return max(0, (extent - 1) * self.stride - 2 * self.padding + self.reach + self.output_padding)

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        first = -(-(out.start + self.padding - self.reach + 1) // self.stride)
        last = (out.stop - 1 + self.padding) // self.stride
        return merge([Span(first, last + 1).intersect(Span(0, extent))])


def excess(steps: Sequence[Transposed], out: Box, extents: Sequence[int]) -> list[tuple[int, int]]:
    """How far the outputs of the inputs that `out` needs reach below and above it; negative where they fall short."""
    reaches = []
    for step, span, extent in zip(steps, out.spans, extents, strict=True):
        (needed,) = step.needs(span, extent)
        first = needed.start * step.stride - step.padding
        last = (needed.stop - 1) * step.stride - step.padding + step.reach
        reaches.append((span.start - first, last - span.stop))
    return reaches


@dataclass(frozen=True, slots=True)
class Padded:
    """`F.pad` of one dim; negative pads crop, but not with circular padding, which torch then wraps wrongly."""

    low: int
    high: int
    mode: PaddingMode = "zeros"

    def out_extent(self, extent: int) -> int:
        return extent + self.low + self.high

    def extended(self, out: Span) -> Span:
        return out.shift(-self.low)

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        return _sources(self.extended(out), extent, self.mode)


@dataclass(frozen=True, slots=True)
class Strided:
    """A slice `start : : step` of `count` indices; a negative step reads backwards (flip)."""

    start: int
    step: int
    count: int

    def out_extent(self, extent: int) -> int:
        del extent
        return self.count

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        del extent
        ends = (self.start + out.start * self.step, self.start + (out.stop - 1) * self.step)
        return (Span(min(ends), max(ends) + 1),)


@dataclass(frozen=True, slots=True)
class Placed:
    """One input of a concatenation: it fills the output from `offset` on."""

    offset: int
    total: int

    def out_extent(self, extent: int) -> int:
        del extent
        return self.total

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        return merge([out.shift(-self.offset).intersect(Span(0, extent))])


@dataclass(frozen=True, slots=True)
class Spread:
    """Broadcasting: an input of extent 1 serves every output index."""

    out: int

    def out_extent(self, extent: int) -> int:
        del extent
        return self.out

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        del out, extent
        return (Span(0, 1),)


def _sources(extended: Span, extent: int, mode: PaddingMode) -> tuple[Span, ...]:
    """The input indices behind an extended span, which may reach beyond the borders."""
    if extended.start >= 0 and extended.stop <= extent:
        return (extended,)
    return merge(piece.source for piece in fold(extended, extent, mode))


def demand(work: Layout, maps: Sequence[DimMap], shape: Sequence[int]) -> Demand:
    """What every rank needs of an input of `shape` to compute its box of the output laid out as `work`."""
    return Demand(work.mesh, [_dim_demand(cut, m, n) for cut, m, n in zip(work.cuts, maps, shape, strict=True)])


@lru_cache(maxsize=KEPT)
def _dim_demand(cut: Cut, dim_map: DimMap, extent: int) -> DimDemand:
    axes, partition = cut
    bounds = itertools.pairwise(partition.bounds)
    spans = (dim_map.needs(Span(a, b), extent) if a < b else () for a, b in bounds)
    if not isinstance(dim_map, Window) or dim_map.mode != "zeros":
        return DimDemand(axes, spans)
    return DimDemand(axes, spans, lambda part: dim_map.frame(partition.span(part), extent))


def out_shape(maps: Sequence[DimMap], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(m.out_extent(n) for m, n in zip(maps, shape, strict=True))
