"""Interpolation and pixel shuffles, dim by dim.

Which input index an output index reads, and with which weight, follows from the *global* output index in exactly
torch's arithmetic, rounding included: a shard that rounded differently would pick another neighbour than a single
device does, and at index 1,000 one unit in the last place of a float32 position is 6e-5 of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from convmesh.layout.box import Span

Method = Literal["nearest", "nearest-exact", "linear", "cubic"]

Arithmetic = Literal["single", "fused", "double"]
"""How positions are rounded: in float32, in float32 but once for the product and the half index, or in float64."""

Array = npt.NDArray[Any]

LARGEST_EXACT_DENOMINATOR = 16
"""Positions in steps of a sixteenth are exact in float32 up to half a million indices."""


class Taps(NamedTuple):
    """Input indices and weights, one row per tap; a single tap has weight 1, stored as no weights."""

    indices: Array
    weights: Array | None


class Alone(NamedTuple):
    """Part of a resized dim as a resize of its own: to `extent` indices, of which those in `kept` are wanted."""

    extent: int
    kept: Span


def step_of(extent: int, out: int, scale: float | None, align_corners: bool, arithmetic: Arithmetic) -> float:
    """Input indices from one output index to the next, as torch rounds them."""
    kind = _kind(arithmetic)
    if align_corners:
        return float(kind(extent - 1) / kind(out - 1)) if out > 1 else 0.0
    return float(kind(1.0 / scale) if scale else kind(extent) / kind(out))


@dataclass(frozen=True, slots=True)
class Resized:
    """Interpolation to `out` indices that lie `step` input indices apart."""

    method: Method
    out: int
    step: float
    align_corners: bool = False
    arithmetic: Arithmetic = "fused"

    def out_extent(self, extent: int) -> int:
        del extent
        return self.out

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        if out == Span(0, self.out):
            return (Span(0, extent),)  # a dim that is not cut stays as it is
        indices = self.taps(out, extent).indices
        return (Span(int(indices.min()), int(indices.max()) + 1),)

    def taps(self, out: Span, extent: int) -> Taps:
        """The taps behind the outputs `out`, in the input's global indices."""
        positions = self._positions(out)
        if self.method in ("nearest", "nearest-exact"):
            return Taps(_floor(positions, extent)[None], None)
        if self.method == "linear":
            return _linear(positions, extent)
        return _cubic(positions, extent)

    def alone(self, out: Span, held: Span, extent: int) -> Alone | None:
        """How a plain resize of the indices `held` (those that `out` needs) gives `out`, if it is exact to the bit."""
        step = Fraction(self.step)
        exact = step.denominator <= LARGEST_EXACT_DENOMINATOR
        if out == Span(0, self.out) and held == Span(0, extent) and (exact or self.method in ("linear", "cubic")):
            plain = step_of(extent, self.out, None, self.align_corners, self.arithmetic)
            return Alone(self.out, out) if plain == self.step else None
        if not exact or not step or self.align_corners:
            return None
        first, count = held.start / step, held.extent / step
        if first.denominator != 1 or count.denominator != 1:
            return None
        kept = out.shift(-first.numerator)
        return Alone(count.numerator, kept) if kept.start >= 0 and kept.stop <= count else None

    def _positions(self, out: Span) -> Array:
        kind = _kind(self.arithmetic)
        index = np.arange(out.start, out.stop, dtype=np.float64)
        # Products of float32 numbers are exact in float64, so each `astype` below is the one rounding that torch does.
        if self.method == "nearest" or self.align_corners:
            return (self.step * index).astype(kind)
        if self.method == "nearest-exact" and self.arithmetic != "fused":
            return (self.step * (index + 0.5)).astype(kind)
        product: Array = self.step * (index + 0.5)
        product = product if self.arithmetic == "fused" else product.astype(kind)
        centred: Array = (product - 0.5).astype(kind)
        if self.method == "cubic":
            return centred
        inside: Array = np.maximum(centred, kind(0))
        return inside.astype(np.float64) + 0.5 if self.method == "nearest-exact" else inside


@dataclass(frozen=True, slots=True)
class Repeated:
    """Output `o` reads input `o // factor`: the space of a pixel shuffle, the channels of its inverse."""

    factor: int

    def out_extent(self, extent: int) -> int:
        return extent * self.factor

    def needs(self, out: Span, extent: int) -> tuple[Span, ...]:
        del extent
        return (Span(out.start // self.factor, -(-out.stop // self.factor)),)


def _kind(arithmetic: Arithmetic) -> type[np.float32] | type[np.float64]:
    return np.float64 if arithmetic == "double" else np.float32


def _floor(positions: Array, extent: int) -> Array:
    """torch rounds even a double to float32 before it takes the floor."""
    below: Array = np.floor(positions.astype(np.float32)).astype(np.int64)
    return np.minimum(below, extent - 1)


def _fraction(positions: Array, below: Array) -> Array:
    share: Array = positions - below.astype(positions.dtype)
    return share.clip(0, 1)


def _linear(positions: Array, extent: int) -> Taps:
    below = _floor(positions, extent)
    share = _fraction(positions, below)
    return Taps(np.stack([below, np.minimum(below + 1, extent - 1)]), np.stack([1 - share, share]))


def _cubic(positions: Array, extent: int) -> Taps:
    """The cubic convolution kernel with a = -0.75 (Keys 1981); taps beyond the border repeat it."""
    below = _floor(positions, extent)
    share = _fraction(positions, below)
    far, near = _outer_cubic, _inner_cubic
    weights = [far(share + 1), near(share), near(1 - share), far(2 - share)]
    return Taps(np.stack([np.clip(below + tap, 0, extent - 1) for tap in (-1, 0, 1, 2)]), np.stack(weights))


def _inner_cubic(distance: Array) -> Array:
    return (1.25 * distance - 2.25) * distance * distance + 1


def _outer_cubic(distance: Array) -> Array:
    return ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
