"""What lies beyond the borders of a dim: zeros, or indices folded back inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from convmesh.errors import UnsupportedError
from convmesh.layout.box import Span

PaddingMode = Literal["zeros", "circular", "reflect", "replicate"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an extended span: `target` holds the indices of `source` in order, reversed, or one index repeated."""

    target: Span
    source: Span
    order: Literal["same", "reversed", "repeated"] = "same"


def fold(extended: Span, extent: int, mode: PaddingMode) -> tuple[Piece, ...]:
    """Where the values of `extended`, which may reach beyond `[0, extent)`, come from; zeros come from nowhere."""
    low = Span(extended.start, min(extended.stop, 0))
    high = Span(max(extended.start, extent), extended.stop)
    inside = extended.intersect(Span(0, extent))
    pieces = [Piece(inside, inside)]
    if mode == "circular":
        pieces = [Piece(low, low.shift(extent)), *pieces, Piece(high, high.shift(-extent))]
    elif mode == "reflect":
        below = Span(1 - low.stop, 1 - low.start)
        above = Span(2 * extent - 1 - high.stop, 2 * extent - 1 - high.start)
        pieces = [Piece(low, below, "reversed"), *pieces, Piece(high, above, "reversed")]
    elif mode == "replicate":
        pieces = [Piece(low, Span(0, 1), "repeated"), *pieces, Piece(high, Span(extent - 1, extent), "repeated")]
    return tuple(piece for piece in pieces if piece.target.extent)


def check_padding(mode: str, pads: tuple[int, int], extent: int) -> PaddingMode:
    """Refuse unknown modes, and pads that fold over themselves (torch's own limits)."""
    if mode not in get_args(PaddingMode):
        raise UnsupportedError(f"`padding_mode` (={mode!r}) must be one of {', '.join(get_args(PaddingMode))}.")
    most = {"circular": extent, "reflect": extent - 1}.get(mode)
    if most is not None and max(pads) > most:
        raise UnsupportedError(
            f"`padding` (={max(pads)}) must be at most {most} for {mode} padding of extent {extent}."
        )
    return mode  # type: ignore[return-value]
