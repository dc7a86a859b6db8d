"""One dim of a window's output, or of its input, in slabs that are computed one after another on one device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from convmesh.layout.box import Span
from convmesh.layout.maps import Transposed, Window
from convmesh.layout.partition import Partition


@dataclass(frozen=True, slots=True)
class OutputSlab:
    """Outputs, the input that their windows cover, and the padding that they cover below and above it."""

    out: Span
    source: Span
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class InputSlab:
    """Inputs, the outputs whose windows cover any of them, and all that those windows cover, beyond the borders too."""

    near: Span
    outs: Span
    frame: Span

    @property
    def covered(self) -> Span:
        return self.near.intersect(self.frame)


def output_slabs(window: Window, extent: int, most: int) -> tuple[OutputSlab, ...]:
    """All outputs of an input of `extent`, at most `most` in a slab.

    Windows that reach into padding are in slabs of their own, which are thin: the input of all others is read in place.
    """
    outs = window.out_extent(extent)
    first = min(-(-window.low // window.stride), outs)
    last = min(max(first, (extent + window.low - window.reach) // window.stride + 1), outs)
    runs = (Span(0, first), Span(first, last), Span(last, outs))
    return tuple(_output_slab(window, out, extent) for run in runs for out in _pieces(run, most))


def _output_slab(window: Window, out: Span, extent: int) -> OutputSlab:
    under = window.extended(out)
    source = under.intersect(Span(0, extent))
    if not source.extent:
        return OutputSlab(out, Span(0, 0), under.extent, 0)
    return OutputSlab(out, source, source.start - under.start, under.stop - source.stop)


def input_slabs(window: Window, extent: int, most: int) -> tuple[InputSlab, ...]:
    """All inputs, at most `most` in a slab; `outs` is empty where no window covers any of a slab."""
    adjoint = Transposed(window.kernel, window.stride, window.dilation, window.low)
    outs = window.out_extent(extent)
    return tuple(_input_slab(window, adjoint, near, outs) for near in _pieces(Span(0, extent), most))


def _input_slab(window: Window, adjoint: Transposed, near: Span, outs: int) -> InputSlab:
    reached = adjoint.needs(near, outs)
    return InputSlab(near, reached[0], window.extended(reached[0])) if reached else InputSlab(near, *_NOTHING)


_NOTHING = Span(0, 0), Span(0, 0)


def _pieces(run: Span, most: int) -> tuple[Span, ...]:
    """The run in the fewest pieces of at most `most` indices, of nearly one size."""
    bounds = Partition.even(run.extent, max(1, -(-run.extent // most))).bounds
    pieces = (Span(*pair).shift(run.start) for pair in itertools.pairwise(bounds))
    return tuple(piece for piece in pieces if piece.extent)
