"""Output span → input spans, per dim, for every operator.

An operator is split by stating, for each of its dims, which input indices an output span needs. Halo widths, multi-hop
halos, uneven, thin and empty shards all follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from convmesh.layout.borders import PaddingMode, fold
from convmesh.layout.box import Span, merge
from convmesh.layout.demand import Demand, DimDemand
from convmesh.layout.layout import Layout


class DimMap(Protocol):
    """How one dim of an operator's output depends on one dim of its input."""

    def out_extent(self, extent: int) -> int:
        """The output's extent for an input of `extent`."""

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        """The indices of an input of `extent` that a non-empty `out` needs: sorted, disjoint, inside the input."""


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
    """Every output index needs the whole dim, e.g. the contracted dim of a dense layer; `out` is the output's extent."""

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
        if room < 0:
            return 0
        out = room // self.stride + 1
        if self.ceil and room % self.stride and out * self.stride < extent + self.low:
            out += 1  # torch keeps a last partial window only if it starts inside the input or its left padding
        return out

    def extended(self, out: Span) -> Span:
        """The indices under the windows of `out`, beyond the borders too."""
        return Span(out.start * self.stride - self.low, (out.stop - 1) * self.stride - self.low + self.reach)

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        return merge(piece.source for piece in fold(self.extended(out), extent, self.mode))


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


@dataclass(frozen=True, slots=True)
class Padded:
    """`F.pad` of one dim; negative pads crop."""

    low: int
    high: int
    mode: PaddingMode = "zeros"

    def out_extent(self, extent: int) -> int:
        return extent + self.low + self.high

    def extended(self, out: Span) -> Span:
        return out.shift(-self.low)

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        return merge(piece.source for piece in fold(self.extended(out), extent, self.mode))


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


def demand(work: Layout, maps: Sequence[DimMap], shape: Sequence[int]) -> Demand:
    """What every rank needs of an input of `shape` to compute its box of the output laid out as `work`."""
    return Demand(work.mesh, [_dim_demand(work, d, m, n) for d, (m, n) in enumerate(zip(maps, shape, strict=True))])


def _dim_demand(work: Layout, dim: int, dim_map: DimMap, extent: int) -> DimDemand:
    axes, partition = work.cuts[dim]
    spans = (partition.span(part) for part in range(partition.parts))
    return DimDemand(axes, [dim_map.needs(span, extent) if span.extent else () for span in spans])


def out_shape(maps: Sequence[DimMap], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(m.out_extent(n) for m, n in zip(maps, shape, strict=True))
