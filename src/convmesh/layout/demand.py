"""What every rank holds or needs of one tensor: the two sides of an exchange."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from convmesh.layout.box import Region, Span
from convmesh.layout.layout import Cut, Layout
from convmesh.layout.mesh import Mesh

Ints = npt.NDArray[np.int64]

KEPT = 256
"""Demands to cache: layers share most of theirs, and each has a number for every rank along its axes."""


class DimDemand:
    """One dim: for each part along `axes` the spans that its ranks hold or need; parts may overlap.

    Kept as arrays: a rank looks at a few of many thousand parts, and carriers are chosen by counting. `frame` holds the
    spans that a tensor for a part has room for, if that is more than the part needs: operators may skip indices.
    """

    def __init__(
        self, axes: tuple[str, ...], spans: Iterable[tuple[Span, ...]], frame: Callable[[int], Span] | None = None
    ) -> None:
        counts: list[int] = []
        numbers: list[int] = []
        for part in spans:
            counts.append(len(part))
            for span in part:
                numbers += span
        self.axes = axes
        self._frame = frame
        self._spans = np.array(numbers, dtype=np.int64).reshape(-1, 2)
        self._first = np.cumsum([0, *counts])
        self._listed: dict[int, tuple[Span, ...]] = {}

    def __repr__(self) -> str:
        return f"DimDemand({self.axes}, {[self.part(index) for index in range(self.parts)]})"

    @lru_cache(maxsize=KEPT)  # noqa: B019
    def same_as(self, other: DimDemand) -> bool:
        """Whether every rank holds or needs the same in both."""
        return self is other or (
            self.axes == other.axes
            and np.array_equal(self._first, other._first)
            and np.array_equal(self._spans, other._spans)
        )

    @property
    def parts(self) -> int:
        return len(self._first) - 1

    def part(self, index: int) -> tuple[Span, ...]:
        """The spans of one part."""
        if index not in self._listed:
            rows = self._spans[self._first[index] : self._first[index + 1]]
            self._listed[index] = tuple(Span(start, stop) for start, stop in rows.tolist())
        return self._listed[index]

    def frame(self, index: int) -> tuple[Span, ...]:
        """The spans that a tensor for one part has room for."""
        if self._frame is None:
            return self.part(index)
        span = self._frame(index)
        return (span,) if span.extent else ()

    @cached_property
    def hulls(self) -> tuple[Ints, Ints]:
        """First and last-plus-one index of every part; zeros for parts without indices."""
        starts, stops = np.zeros((2, self.parts), dtype=np.int64)
        filled = np.diff(self._first) > 0
        starts[filled] = self._spans[self._first[:-1][filled], 0]
        stops[filled] = self._spans[self._first[1:][filled] - 1, 1]
        return starts, stops

    @cached_property
    def extents(self) -> Ints:
        """The number of indices of every part."""
        return self._summed(self._spans[:, 1] - self._spans[:, 0])

    @lru_cache(maxsize=KEPT)  # noqa: B019 - demands are kept as long as what asks for them
    def degree(self, asked: DimDemand) -> int:
        """Most of these parts that one part of `asked` shares indices with: exact, or too high if there are holes."""
        if self.parts == asked.parts == 1:
            return int(any(self.near((span,)) for span in asked.part(0)))
        starts, stops = self.hulls
        filled = stops > starts
        begun = np.searchsorted(np.sort(starts[filled]), asked._spans[:, 1], side="left")
        ended = np.searchsorted(np.sort(stops[filled]), asked._spans[:, 0], side="right")
        return int(min(asked._summed(begun - ended).max(), filled.sum()))

    @lru_cache(maxsize=KEPT)  # noqa: B019
    def covers(self, asked: DimDemand) -> bool:
        """Whether the hull of each part holds what the same part of `asked` has."""
        (starts, stops), (asked_starts, asked_stops) = self.hulls, asked.hulls
        inside = (starts <= asked_starts) & (asked_stops <= stops)
        return bool(np.all(inside | (asked_starts == asked_stops)))

    def near(self, spans: tuple[Span, ...]) -> list[int]:
        """The parts that may share indices with `spans`: those whose hulls do."""
        if not spans:
            return []
        if self.parts == 1:
            own = self.part(0)
            return [0] if own and own[0].start < spans[-1].stop and own[-1].stop > spans[0].start else []
        starts, stops = self.hulls
        parts: list[int] = np.flatnonzero((starts < spans[-1].stop) & (stops > spans[0].start)).tolist()
        return parts

    def _summed(self, values: Ints) -> Ints:
        """Values of spans, summed for each part."""
        sums: Ints = np.concatenate(([0], np.cumsum(values)))[self._first]
        return sums[1:] - sums[:-1]


class Demand:
    """A product of per-dim demands over a mesh."""

    def __init__(self, mesh: Mesh, dims: Sequence[DimDemand]) -> None:
        self.mesh = mesh
        self.dims = tuple(dims)

    @classmethod
    def ownership(cls, layout: Layout) -> Demand:
        """Every rank 'needs' exactly what it holds."""
        return cls(layout.mesh, [_owned(cut) for cut in layout.cuts])

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes along which ranks differ in what they hold or need; along the others they are replicas."""
        return frozenset(name for dim in self.dims for name in dim.axes)

    def region(self, rank: int) -> Region:
        """What `rank` holds or needs."""
        here = self.mesh.coordinates(rank)
        return Region(tuple(dim.part(self.mesh.part(dim.axes, here)) for dim in self.dims))

    def frame(self, rank: int) -> Region:
        """The same, with the holes that a tensor for it has room for."""
        here = self.mesh.coordinates(rank)
        return Region(tuple(dim.frame(self.mesh.part(dim.axes, here)) for dim in self.dims))


@lru_cache(maxsize=KEPT)
def _owned(cut: Cut) -> DimDemand:
    pairs = itertools.pairwise(cut.partition.bounds)
    return DimDemand(cut.axes, ((Span(a, b),) if a < b else () for a, b in pairs))
