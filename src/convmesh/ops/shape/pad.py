"""Split padding and cropping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from convmesh.layout import Box
from convmesh.layout.borders import check_padding
from convmesh.layout.maps import Padded, Same
from convmesh.ops.core.exchange_plans import Maps, output_layout
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.padding import extend, outside
from convmesh.ops.core.probe import probe
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded


@implements(F.pad)
def pad(
    input: Sharded,  # noqa: A002 - torch's name
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Sharded:
    """`F.pad` in every mode; negative amounts crop. The result is cut by the same axes as the input."""
    x, amounts = input, list(pad)
    F.pad(probe(x), amounts, mode, value)
    if mode == "constant":
        return _fill(x, _maps(x, amounts, "zeros"), 0.0 if value is None else value)
    if mode == "circular" and min(amounts) < 0:
        # Cropped values must not reappear on the other side.
        x = _fill(x, _maps(x, [min(amount, 0) for amount in amounts], "zeros"), 0.0)
        amounts = [max(amount, 0) for amount in amounts]
    return _fold(x, _maps(x, amounts, mode))


def _maps(x: Sharded, amounts: Sequence[int], mode: str) -> Maps:
    """A map per dim; torch lists the amounts from the last dim backwards, low before high."""
    pairs = list(zip(amounts[::2], amounts[1::2], strict=True))[::-1]
    lead = x.dim() - len(pairs)
    last = (_padded(pair, mode, extent) for pair, extent in zip(pairs, x.shape[lead:], strict=True))
    return (*[Same()] * lead, *last)


def _padded(amounts: tuple[int, int], mode: str, extent: int) -> Same | Padded:
    return Padded(*amounts, check_padding(mode, amounts, extent)) if any(amounts) else Same()


def _fill(x: Sharded, maps: Maps, value: float) -> Sharded:
    """One local `F.pad` on the ranks whose boxes reach beyond the input."""
    work = output_layout(x.layout, maps)
    amounts: list[int] = []
    for dim_map, span, extent in zip(maps, work.box(x.mesh.rank).spans, x.shape, strict=True):
        ends = outside(dim_map.extended(span), extent) if isinstance(dim_map, Padded) else (0, 0)
        amounts = [*ends, *amounts]
    local = fetch(x, work, maps)
    return Sharded(F.pad(local, amounts, value=value) if any(amounts) else local, work, x.mesh)


def _fold(x: Sharded, maps: Maps) -> Sharded:
    """Add borders that repeat the input, dim by dim."""
    work = output_layout(x.layout, maps)
    return Sharded(fold_borders(fetch(x, work, maps), maps, work.box(x.mesh.rank), x.shape), work, x.mesh)


def fold_borders(local: torch.Tensor, maps: Maps, out: Box, shape: Sequence[int]) -> torch.Tensor:
    """The values of the box `out`, from the indices that `maps` need; every padded dim folds by its own mode."""
    for dim, (dim_map, span) in enumerate(zip(maps, out.spans, strict=True)):
        if isinstance(dim_map, Padded) and span.extent:
            local = extend(local, dim, dim_map.extended(span), shape[dim], dim_map.mode)
    return local
