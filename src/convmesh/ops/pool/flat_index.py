"""Flat spatial indices, which max pooling returns and unpooling takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unravel(flat: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """One index per dim; if `flat` is outside `shape`, only the first index is out of range."""
    coordinates = []
    for extent in reversed(shape[1:]):
        coordinates.append(flat % extent)
        flat = flat.div(extent, rounding_mode="floor")
    return [flat, *reversed(coordinates)]


def ravel(coordinates: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    flat = coordinates[0]
    for coordinate, extent in zip(coordinates[1:], shape[1:], strict=True):
        flat = flat * extent + coordinate
    return flat


def rebase(flat: torch.Tensor, held: Sequence[int], starts: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Convert indices into a part with extents `held` that begins at `starts` to indices into all of `shape`."""
    if tuple(held) == tuple(shape) and not any(starts):
        return flat
    return ravel([c + start for c, start in zip(unravel(flat, held), starts, strict=True)], shape)
