"""How one dim is cut over the ranks of its axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property, lru_cache

from convmesh.errors import LayoutError
from convmesh.layout.box import Span


class Partition:
    """Part `j` owns the indices from `bounds[j]` to `bounds[j + 1]`; parts may be uneven or empty."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = tuple(bounds)
        if not _is_valid(self.bounds):
            raise LayoutError(
                f"`bounds` (={self.bounds}) must be whole numbers that start at 0 and never fall, e.g. (0, 6, 11, 16)."
            )
        self._hash = hash(self.bounds)

    @staticmethod
    def even(extent: int, parts: int) -> Partition:
        """Parts whose sizes differ by at most one, the larger ones first."""
        if extent < 0 or parts < 1:
            raise LayoutError(f"`extent` (={extent}) must not be negative, and `parts` (={parts}) at least 1.")
        return _even(extent, parts)

    @staticmethod
    def weighted(extent: int, weights: Sequence[int]) -> Partition:
        """A part for each weight, in proportion to it: every bound is the whole index nearest to its exact place."""
        if extent < 0 or not weights or min(weights) < 0 or not any(weights):
            raise LayoutError(f"`extent` (={extent}) must not be negative, nor any of `weights` (={tuple(weights)}).")
        return _weighted(extent, tuple(weights))

    @staticmethod
    def nested(extent: int, sizes: Sequence[int]) -> Partition:
        """Cut axis by axis into pieces of equal extent except the last ones, as `torch.chunk` and DTensor do."""
        return _nested(extent, tuple(sizes))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Partition:
        bounds = [0]
        for size in sizes:
            bounds.append(bounds[-1] + size)
        return cls(bounds)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Partition) and self.bounds == other.bounds)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Partition({self.bounds})"

    @property
    def extent(self) -> int:
        return self.bounds[-1]

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1

    def span(self, part: int) -> Span:
        return Span(self.bounds[part], self.bounds[part + 1])

    @cached_property
    def is_even(self) -> bool:
        return self == Partition.even(self.extent, self.parts)

    def rescale(self, extent: int) -> Partition:
        """The partition of a dim of another extent that follows this one: even stays even, uneven keeps its shares."""
        if extent == self.extent:
            return self
        if self.is_even or self.extent == 0:
            return Partition.even(extent, self.parts)
        return Partition([(2 * b * extent + self.extent) // (2 * self.extent) for b in self.bounds])


def _chunks(span: Span, parts: int) -> list[Span]:
    step = -(-span.extent // parts)
    starts = [min(span.stop, span.start + j * step) for j in range(parts + 1)]
    return [Span(a, b) for a, b in itertools.pairwise(starts)]


def _is_valid(bounds: tuple[int, ...]) -> bool:
    if len(bounds) < 2 or not all(isinstance(bound, int) for bound in bounds):
        return False
    return bounds[0] == 0 and all(a <= b for a, b in itertools.pairwise(bounds))


@lru_cache(maxsize=4096)
def _even(extent: int, parts: int) -> Partition:
    small, larger = divmod(extent, parts)
    return Partition([j * small + min(j, larger) for j in range(parts + 1)])


@lru_cache(maxsize=4096)
def _nested(extent: int, sizes: tuple[int, ...]) -> Partition:
    spans = [Span(0, extent)]
    for size in sizes:
        spans = [piece for span in spans for piece in _chunks(span, size)]
    return Partition([0, *(span.stop for span in spans)])


@lru_cache(maxsize=4096)
def _weighted(extent: int, weights: tuple[int, ...]) -> Partition:
    total = sum(weights)
    before = itertools.accumulate(weights, initial=0)
    return Partition([(2 * weight * extent + total) // (2 * total) for weight in before])
