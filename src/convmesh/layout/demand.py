"""What every rank holds or needs of one tensor: the two sides of an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from convmesh.layout.box import Region, Span, intersect_spans
from convmesh.layout.layout import Layout
from convmesh.layout.mesh import Mesh


class DimDemand:
    """One dim: for each part along `axes` the spans that its ranks hold or need; parts may overlap."""

    def __init__(self, axes: tuple[str, ...], spans: Sequence[tuple[Span, ...]]) -> None:
        self.axes = axes
        self.spans = tuple(spans)

    def __repr__(self) -> str:
        return f"DimDemand({self.axes}, {self.spans})"

    @cached_property
    def hulls(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First and last-plus-one index of every part: a quick rejection test for meshes of many ranks."""
        starts = [spans[0].start if spans else 0 for spans in self.spans]
        stops = [spans[-1].stop if spans else 0 for spans in self.spans]
        return np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)

    def degree(self, asked: DimDemand) -> int:
        """At most how many of these parts one part of `asked` shares indices with."""
        starts, stops = self._sorted_hulls
        wanted = [(span, part) for part, spans in enumerate(asked.spans) for span in spans]
        if not wanted or not len(starts):
            return 0
        first = np.searchsorted(stops, [span.start for span, _ in wanted], side="right")
        last = np.searchsorted(starts, [span.stop for span, _ in wanted], side="left")
        per_part = np.bincount([part for _, part in wanted], weights=np.maximum(last - first, 0))
        return int(per_part.max())

    @cached_property
    def _sorted_hulls(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Hulls of the non-empty parts. Sorted one by one, so that counts are exact or too high for jumbled parts."""
        starts, stops = self.hulls
        filled = stops > starts
        return np.sort(starts[filled]), np.sort(stops[filled])

    def overlapping(self, spans: tuple[Span, ...]) -> list[tuple[int, tuple[Span, ...]]]:
        """The parts that share indices with `spans`, with those indices."""
        if not spans:
            return []
        starts, stops = self.hulls
        candidates = np.flatnonzero((starts < spans[-1].stop) & (stops > spans[0].start))
        found = ((int(part), intersect_spans(self.spans[part], spans)) for part in candidates)
        return [(part, common) for part, common in found if common]


class Demand:
    """A product of per-dim demands over a mesh."""

    def __init__(self, mesh: Mesh, dims: Sequence[DimDemand]) -> None:
        self.mesh = mesh
        self.dims = tuple(dims)

    @classmethod
    def ownership(cls, layout: Layout) -> Demand:
        """Every rank 'needs' just what it holds."""
        return cls(layout.mesh, [_owned(cut.axes, cut.partition.bounds) for cut in layout.cuts])

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes along which ranks differ in what they hold or need; along the others they are replicas."""
        return frozenset(name for dim in self.dims for name in dim.axes)

    def region(self, rank: int) -> Region:
        here = self.mesh.coordinates(rank)
        return Region(tuple(dim.spans[self.mesh.part(dim.axes, here)] for dim in self.dims))


def _owned(axes: tuple[str, ...], bounds: tuple[int, ...]) -> DimDemand:
    spans = (Span(a, b) for a, b in zip(bounds, bounds[1:], strict=False))
    return DimDemand(axes, [(span,) if span.extent else () for span in spans])
