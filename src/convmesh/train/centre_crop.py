"""Test samples of a run whose training samples are cropped: the window in the middle, always the same."""

from __future__ import annotations

from dataclasses import dataclass

from convmesh.data import Augment, SampleTransform
from convmesh.layout import Box, Span


@dataclass(frozen=True)
class CentreCrop(Augment):
    """Crops to the middle of every sample."""

    def of(self, epoch: int, index: int, space: tuple[int, ...]) -> SampleTransform:
        del epoch, index
        extents = self.shape((1, *space))[1:]
        starts = [(whole - part) // 2 for whole, part in zip(space, extents, strict=True)]
        window = Box(tuple(Span(at, at + part) for at, part in zip(starts, extents, strict=True)))
        return SampleTransform(window, tuple(range(len(space))), (False,) * len(space))
