"""Adds padding to a rank's input after its own indices have been fetched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from convmesh.layout import Region, Span
from convmesh.layout.borders import PaddingMode, fold
from convmesh.layout.box import merge


def extend(
    local: torch.Tensor, dim: int, extended: Span, extent: int, mode: PaddingMode = "zeros", value: float = 0.0
) -> torch.Tensor:
    """The values of `extended` in dim `dim`, including those beyond the borders, from a fetched tensor.

    `local` holds the indices that `fold(extended, extent, mode)` needs, back to back. `value` fills the "zeros".
    """
    pieces = fold(extended, extent, mode)
    if mode == "zeros":
        return pad_dim(local, dim, *outside(extended, extent), value)
    if len(pieces) == 1 and pieces[0].order == "same":
        return local
    held = Region((merge(piece.source for piece in pieces),))
    parts = []
    for piece in pieces:
        (place,) = Region(((piece.source,),)).within(held).dims[0]
        part = local.narrow(dim, place.start, place.extent)
        if piece.order == "reversed":
            part = part.flip(dim)
        elif piece.order == "repeated":
            part = part.expand([piece.target.extent if d == dim else -1 for d in range(local.dim())])
        parts.append(part)
    return torch.cat(parts, dim)


def outside(extended: Span, extent: int) -> tuple[int, int]:
    """How many indices of `extended` are below and above `[0, extent)`."""
    inside = extended.intersect(Span(0, extent))
    # A span entirely outside is all padding.
    low = inside.start - extended.start if inside.extent else extended.extent
    return low, extended.extent - low - inside.extent


def pad_dim(tensor: torch.Tensor, dim: int, low: int, high: int, value: float = 0.0) -> torch.Tensor:
    """Constant padding of one dim; negative amounts crop."""
    if low == high == 0:
        return tensor
    if low <= 0 and high <= 0:
        return tensor.narrow(dim, -low, tensor.shape[dim] + low + high)
    pads = [0, 0] * (tensor.dim() - dim - 1) + [low, high]
    return F.pad(tensor, pads, value=value)


def pad_dims(tensor: torch.Tensor, pads: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Zero padding of the spatial dims; negative amounts crop."""
    for dim, (low, high) in enumerate(pads, start=2):
        tensor = pad_dim(tensor, dim, low, high)
    return tensor


def unpad_dims(tensor: torch.Tensor, pads: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The adjoint of `pad_dims`."""
    return pad_dims(tensor, [(-low, -high) for low, high in pads])
