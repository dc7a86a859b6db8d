"""An array in a file: its shape, and the values of a box of it."""

from __future__ import annotations

import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from convmesh.data.tensor_spec import Array
from convmesh.layout import Box, Span

T = TypeVar("T")


class StoredArray(ABC):
    """Reads boxes. Safe to share between threads, and to use in processes that were forked after it was made."""

    name: str
    """The file, and the array in it, for error messages."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    unit: tuple[int, ...] | None = None
    """The shape of the smallest block that can be read; None where any run of bytes can."""
    storage: str = "contiguous"
    """How the values lie in the file, in words."""

    @abstractmethod
    def read_into(self, box: Box, out: Array) -> None:
        """Write the values of `box` to `out`, which has the box's shape and may be of another type."""

    def bytes_to_read(self, box: Box) -> int:
        """Decoded bytes to read from the file for `box`: whole blocks where only those can be read."""
        if self.unit is None or box.size == 0:
            return box.size * self.dtype.itemsize
        spans = [Span(s.start // u * u, -(-s.stop // u) * u) for s, u in zip(box.spans, self.unit, strict=True)]
        return math.prod(span.extent for span in spans) * self.dtype.itemsize


def dims_text(shape: Sequence[int]) -> str:
    """A shape as text, `1×64×64`."""
    return "×".join(map(str, shape))


def blocks(box: Box, unit: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The blocks of a grid of `unit`s that `box` intersects: the block's place in the grid, and the common indices."""
    if box.size == 0:
        return
    ranges = [range(s.start // u, -(-s.stop // u)) for s, u in zip(box.spans, unit, strict=True)]
    for place in itertools.product(*ranges):
        whole = Box(tuple(Span(at * u, (at + 1) * u) for at, u in zip(place, unit, strict=True)))
        yield place, whole.intersect(box)


def from_corner(box: Box, place: Sequence[int], unit: Sequence[int]) -> Box:
    """The indices of a box counted from the corner of a block of the grid."""
    return Box(tuple(s.shift(-at * u) for s, at, u in zip(box.spans, place, unit, strict=True)))


class PerProcess(Generic[T]):
    """A handle that every process opens for itself: a parent's handles, locks and threads do not survive a fork."""

    def __init__(self, opened: Callable[[], T]) -> None:
        self._opened = opened
        self._held: tuple[int, T] | None = None

    def get(self) -> T:
        held = self._held
        if held is None or held[0] != os.getpid():
            held = self._held = (os.getpid(), self._opened())
        return held[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"_opened": self._opened, "_held": None}
