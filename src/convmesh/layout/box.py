"""Half-open index ranges: spans of one dim, regions of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from convmesh.layout.kept import Kept


class Span(NamedTuple):
    """The indices `start <= i < stop` of one dim; empty when `stop <= start`."""

    start: int
    stop: int

    @property
    def extent(self) -> int:
        extent = self[1] - self[0]
        return extent if extent > 0 else 0

    def intersect(self, other: Span) -> Span:
        """The common indices; if there are none, an empty span at a sane place."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> Span:
        return Span(self.start + offset, self.stop + offset)

    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open index range per dim."""

    spans: tuple[Span, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls(tuple(Span(0, n) for n in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([s.extent for s in self.spans])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box:
        return Box(tuple(a.intersect(b) for a, b in zip(self.spans, other.spans, strict=True)))

    def relative_to(self, other: Box) -> Box:
        """The same indices counted from the first index of `other`."""
        return Box(tuple(a.shift(-b.start) for a, b in zip(self.spans, other.spans, strict=True)))

    def inside(self, other: Box) -> Box:
        """Indices counted from the first index of `other`, in its own count: the inverse of `relative_to`."""
        return Box(tuple(a.shift(b.start) for a, b in zip(self.spans, other.spans, strict=True)))

    def slices(self) -> tuple[slice, ...]:
        return tuple(s.slice() for s in self.spans)


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The union of spans as sorted, disjoint, non-adjacent, non-empty spans."""
    merged: list[Span] = []
    for span in sorted(s for s in spans if s.extent):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def intersect_spans(a: Sequence[Span], b: Sequence[Span]) -> tuple[Span, ...]:
    """The common indices of two span lists, both sorted and disjoint."""
    if len(a) == 1 and len(b) == 1:  # most regions are boxes, and a search meets millions
        start, stop = max(a[0][0], b[0][0]), min(a[0][1], b[0][1])
        return (Span(start, stop),) if start < stop else ()
    return tuple(common for s in a for t in b if (common := s.intersect(t)).extent)


@dataclass(frozen=True)
class Region:
    """A product of span lists: what a rank needs when it needs indices from two ends of a dim (periodic borders).

    A tensor that holds a region stores its spans back to back in every dim ("compact" indices).
    """

    dims: tuple[tuple[Span, ...], ...]

    @classmethod
    def of(cls, box: Box) -> Region:
        return cls(tuple((s,) if s.extent else () for s in box.spans))

    @Kept
    def shape(self) -> tuple[int, ...]:
        return tuple([s[0].extent if len(s) == 1 else sum(span.extent for span in s) for s in self.dims])

    @Kept
    def size(self) -> int:
        return math.prod(self.shape)

    @Kept
    def is_box(self) -> bool:
        """Whether it is one span in every dim."""
        return all(len(spans) == 1 for spans in self.dims)

    def intersect(self, other: Region) -> Region:
        return Region(tuple([intersect_spans(a, b) for a, b in zip(self.dims, other.dims, strict=True)]))

    def within(self, outer: Region) -> Region:
        """These indices in the compact indices of `outer`, which contains them."""
        return Region(tuple([_compact(inner, holder) for inner, holder in zip(self.dims, outer.dims, strict=True)]))


def _compact(inner: Sequence[Span], holder: Sequence[Span]) -> tuple[Span, ...]:
    if len(inner) == 1 and len(holder) == 1:
        (start, stop), (first, last) = inner[0], holder[0]
        return (Span(start - first, stop - first),) if first <= start < stop <= last else ()
    offset, spans = 0, []
    for span in holder:
        spans += [s.shift(offset - span.start) for s in inner if span.start <= s.start and s.stop <= span.stop]
        offset += span.extent
    return merge(spans)
