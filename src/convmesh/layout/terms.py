"""A convolution as a sum of terms, so that work starts before halos arrive.

A convolution is linear in its input. The part of the input that a rank owns yields one term, computed while halos
travel, and each slab of halo yields another, which touches only the outputs near it and only some taps of the kernel.
No term needs a padded copy of the activation, and the terms' adjoints overlap in the same way. With several dims cut,
slabs are peeled off dim by dim: those of one dim span the halos of the later dims, so a corner belongs to one slab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from convmesh.layout.box import Box, Span
from convmesh.layout.maps import Window

MOST_HALO_SHARE = 0.5
"""With more halo than this share of the needed input, one term over all of it is less work than many."""


@dataclass(frozen=True, slots=True)
class DimTerm:
    """One dim of a term: inputs `source`, padded by `low` and `high` (negative: cropped), reach `out` by `taps`."""

    source: Span
    out: Span
    taps: Span
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Term:
    """A convolution of part of the input with part of the kernel, added to part of the output; spatial dims only."""

    dims: tuple[DimTerm, ...]

    @property
    def source(self) -> Box:
        return Box(tuple(d.source for d in self.dims))

    @property
    def out(self) -> Box:
        return Box(tuple(d.out for d in self.dims))

    @property
    def taps(self) -> Box:
        return Box(tuple(d.taps for d in self.dims))


@dataclass(frozen=True, slots=True)
class Terms:
    """`own` needs no halo and covers the whole output box; `late` terms wait for halos.

    Without `own` the one late term covers the box; without either it is empty, or its windows see nothing but padding.
    """

    own: Term | None
    late: tuple[Term, ...]


def split_terms(windows: Sequence[Window], held: Box, out: Box, extents: Sequence[int], overlap: bool = True) -> Terms:
    """The terms of one rank that holds `held` and computes `out` (spatial boxes, global indices).

    Without `overlap`, or if halos outweigh what is held, one term waits for everything.
    """
    if not out.size:
        return Terms(None, ())
    needed = Box(
        tuple(w.extended(o).intersect(Span(0, n)) for w, o, n in zip(windows, out.spans, extents, strict=True))
    )
    if not needed.size:  # windows that lie in the padding alone
        return Terms(None, ())
    kept = held.intersect(needed)
    if not overlap or not kept.size or kept.size < (1 - MOST_HALO_SHARE) * needed.size:
        return Terms(None, (_covering(windows, needed, out),))
    touching = (_touching(windows, slab, out) for slab in _slabs(kept, needed))
    return Terms(_covering(windows, kept, out), tuple(term for term in touching if term))


def _covering(windows: Sequence[Window], source: Box, out: Box) -> Term:
    """The term of `source` over the whole of `out`, with all taps."""
    dims = zip(windows, source.spans, out.spans, strict=True)
    return Term(tuple(_dim_term(w, s, o, Span(0, w.kernel)) for w, s, o in dims))


def _touching(windows: Sequence[Window], source: Box, out: Box) -> Term | None:
    """The term of `source` over the outputs and taps that it touches, if any."""
    dims = [_touched(w, s, o) for w, s, o in zip(windows, source.spans, out.spans, strict=True)]
    touched = tuple(d for d in dims if d is not None)
    return Term(touched) if len(touched) == len(dims) else None


def _touched(window: Window, source: Span, out: Span) -> DimTerm | None:
    first = -(-(source.start + window.low - window.reach + 1) // window.stride)
    last = (source.stop - 1 + window.low) // window.stride
    near = Span(first, last + 1).intersect(out)
    if not near.extent:
        return None
    starts = (near.start * window.stride - window.low, (near.stop - 1) * window.stride - window.low)
    low_tap = max(0, -(-(source.start - starts[1]) // window.dilation))
    high_tap = min(window.kernel - 1, (source.stop - 1 - starts[0]) // window.dilation)
    if high_tap < low_tap:  # the source lies between the taps of a dilated kernel
        return None
    return _dim_term(window, source, near, Span(low_tap, high_tap + 1))


def _dim_term(window: Window, source: Span, out: Span, taps: Span) -> DimTerm:
    start = out.start * window.stride - window.low + taps.start * window.dilation
    stop = (out.stop - 1) * window.stride - window.low + (taps.stop - 1) * window.dilation + 1
    return DimTerm(source, out, taps, low=source.start - start, high=stop - source.stop)


def _slabs(kept: Box, needed: Box) -> list[Box]:
    """`needed` without `kept` as disjoint boxes, at most two per dim."""
    slabs = []
    for dim, (k, n) in enumerate(zip(kept.spans, needed.spans, strict=True)):
        for side in (Span(n.start, k.start), Span(k.stop, n.stop)):
            spans = (*kept.spans[:dim], side, *needed.spans[dim + 1 :])
            if math.prod(s.extent for s in spans):
                slabs.append(Box(spans))
    return slabs


def symmetric_padding(term: DimTerm, stride: int, dilation: int) -> tuple[int, int, int]:
    """How to realise a term's padding: (explicit low, explicit high, what the kernel pads on both sides).

    Kernels pad both sides alike; since they drop a last partial window, a smaller high side does not matter.
    """
    reach = dilation * (term.taps.extent - 1) + 1
    if term.low >= 0 and (term.source.extent + 2 * term.low - reach) // stride + 1 == term.out.extent:
        return 0, 0, term.low
    both = max(0, min(term.low, term.high))
    return term.low - both, term.high - both, both
