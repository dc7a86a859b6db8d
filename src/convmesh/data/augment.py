"""Augmentation as index arithmetic: for a box of the augmented sample, the box to read and what to do with it.

Every choice is a function of seed, epoch and sample, so ranks that hold parts of one sample choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from convmesh.data.hashed_draws import fraction
from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError
from convmesh.layout import Box, Span

DIMS = "DHW"
_DRAW = 2
"""Separates the augmentation's draws from those of the order under the same seed."""


@dataclass(frozen=True)
class SampleTransform:
    """What is done to one sample: take a window, turn and flip its space, scale and shift its values.

    Dim `j` of the result runs along dim `axes[j]` of the window, backwards if `flipped[j]`.
    """

    window: Box
    """Space only; it lies within the sample."""
    axes: tuple[int, ...]
    flipped: tuple[bool, ...]
    scale: float = 1.0
    shift: float = 0.0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The space of the result."""
        return tuple(self.window.shape[axis] for axis in self.axes)

    @property
    def moves(self) -> bool:
        """Whether values change places."""
        return self.axes != tuple(range(len(self.axes))) or any(self.flipped)

    def source_box(self, box: Box) -> Box:
        """The box to read for a box of the result; dims before space stay as they are."""
        lead = len(box.spans) - len(self.axes)
        space: list[Span] = [Span(0, 0)] * len(self.axes)
        for span, axis, flipped in zip(box.spans[lead:], self.axes, self.flipped, strict=True):
            extent = self.window.shape[axis]
            turned = Span(extent - span.stop, extent - span.start) if flipped else span
            space[axis] = turned.shift(self.window.spans[axis].start)
        return Box((*box.spans[:lead], *space))

    def moved(self, values: Array) -> Array:
        """A view of what was read, with the result's dims in its directions."""
        lead = values.ndim - len(self.axes)
        turned = values.transpose(*range(lead), *(lead + axis for axis in self.axes))
        return turned[(..., *(slice(None, None, -1) if flipped else slice(None) for flipped in self.flipped))]

    def relit(self, values: Array) -> Array:
        """Scale and shift input values; integers become float32."""
        if (self.scale, self.shift) == (1.0, 0.0):
            return values
        kind = values.dtype if values.dtype.kind == "f" else np.dtype(np.float32)
        return (values * kind.type(self.scale) + kind.type(self.shift)).astype(kind, copy=False)


@dataclass(frozen=True)
class Augment:
    """Flips, quarter turns, crops and changes of intensity, drawn anew for every sample and epoch.

    `flip` lists dims that are reversed half the time, such as "DHW"; `rotate90` lists planes that are rotated by 0 to 3
    quarter turns, such as ("HW", "DH"); `crop` gives the extents of a window at a random place. `intensity` multiplies
    inputs by 1 ± it, and `shift` adds up to ± it. Targets per voxel move with their inputs.
    """

    seed: int = 0
    flip: str = ""
    rotate90: Sequence[str] = ()
    crop: tuple[int, ...] | None = None
    intensity: float = 0.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        wrong = [name for name in (*self.flip, *"".join(self.rotate90)) if name not in DIMS]
        if wrong or any(len(set(plane)) != 2 for plane in self.rotate90):
            raise DataError(
                f"`flip` (={self.flip!r}) must be letters of {DIMS}, and `rotate90` (={self.rotate90!r}) "
                'planes such as ("HW",).'
            )
        if not 0 <= self.intensity < 1 or self.shift < 0:
            raise DataError(
                f"`intensity` (={self.intensity}) must be from 0 to below 1, `shift` (={self.shift}) not below 0."
            )

    def shape(self, sample: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an augmented input, (C, space)."""
        space = sample[1:]
        if self.crop is None:
            return sample
        if len(self.crop) != len(space) or any(c > n or c < 1 for c, n in zip(self.crop, space, strict=True)):
            raise DataError(
                f"`crop` (={self.crop}) must have the {len(space)} dims of a sample, {space}, and fit in it."
            )
        return (*sample[:1], *self.crop)

    def of(self, epoch: int, index: int, space: tuple[int, ...]) -> SampleTransform:
        """What happens to sample `index` in `epoch`, whose space is `space`."""
        draws = _Draws(self.seed, epoch, index)
        extents = self.shape((1, *space))[1:]
        starts = [draws.whole(n - c + 1) for n, c in zip(space, extents, strict=True)]
        window = Box(tuple(Span(a, a + c) for a, c in zip(starts, extents, strict=True)))
        axes, flipped = self._turned(draws, window)
        scale = 1 + self.intensity * draws.signed() if self.intensity else 1.0
        shift = self.shift * draws.signed() if self.shift else 0.0
        return SampleTransform(window, axes, flipped, scale, shift)

    def _turned(self, draws: _Draws, window: Box) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        axes, flipped = list(range(len(window.spans))), [False] * len(window.spans)
        for plane in self.rotate90:
            a, b = (self._dim(name, window) for name in plane)
            if window.shape[a] != window.shape[b]:
                raise DataError(
                    f"`rotate90` (={self.rotate90!r}) needs equal extents in {plane}, not {window.shape}; crop to "
                    "equal ones, or leave the plane out."
                )
            for _ in range(draws.whole(4)):
                axes[a], axes[b] = axes[b], axes[a]
                flipped[a], flipped[b] = not flipped[b], flipped[a]
        for name in self.flip:
            if draws.whole(2):
                flipped[self._dim(name, window)] ^= True
        return tuple(axes), tuple(flipped)

    def _dim(self, name: str, window: Box) -> int:
        dim = DIMS.index(name) - (len(DIMS) - len(window.spans))
        if dim < 0:
            raise DataError(f"`flip` or `rotate90` names {name}, but samples have {len(window.spans)} dims of space.")
        return dim


class _Draws:
    """One draw after another for one sample."""

    def __init__(self, *keys: int) -> None:
        self._keys, self._count = (keys[0], _DRAW, *keys[1:]), 0

    def whole(self, below: int) -> int:
        return int(self._next() * below)

    def signed(self) -> float:
        """From -1 to below 1."""
        return 2 * self._next() - 1

    def _next(self) -> float:
        self._count += 1
        return fraction(*self._keys, self._count)
