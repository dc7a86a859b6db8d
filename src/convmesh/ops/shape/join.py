"""Split `cat` and `stack`, and their inverses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from convmesh.layout import Layout
from convmesh.layout.maps import DimMap, Placed, Same
from convmesh.ops.core.by_samples import by_samples, not_along_samples
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.probe import probe, probe_of
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.shape.dims import unsqueeze
from convmesh.ops.shape.index import narrow

_T = torch.Tensor

SPLITTING: tuple[Callable[..., Any], ...] = (
    torch.split, _T.split, torch.split_with_sizes, _T.split_with_sizes, torch.chunk, _T.chunk, torch.tensor_split,
    _T.tensor_split, torch.hsplit, _T.hsplit, torch.vsplit, _T.vsplit, torch.dsplit, _T.dsplit,
)  # fmt: skip


by_samples(torch.cat, torch.concat, when=not_along_samples)


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Sharded | torch.Tensor], dim: int = 0) -> Sharded:
    """Concatenate along `dim`, in the layout of the operand that `_lead` chooses; plain tensors count as replicated."""
    shape, dtype = _joined(tuple((t.shape, t.dtype) for t in tensors), dim)
    mesh = next(t.mesh for t in tensors if isinstance(t, Sharded))
    # torch skips operands of shape (0,), whatever the others' dims.
    parts = [on_mesh(t, mesh) for t in tensors if tuple(t.shape) != (0,) or len(shape) == 1]
    work = _lead([part.layout for part in parts]).with_shape(shape)
    dim %= len(shape)
    offsets = itertools.accumulate((part.shape[dim] for part in parts), initial=0)
    fetched = [_placed(part, work, dim, offset) for part, offset in zip(parts, offsets, strict=False)]
    return Sharded(torch.cat([part.to(dtype) for part in fetched], dim), work, mesh)


def _lead(layouts: Sequence[Layout]) -> Layout:
    """The first layout cut in space or channels, else the first that is cut at all.

    Samples come second: a call that treats them one by one must give the same layout when run without other ranks'.
    """
    cut = [layout for layout in layouts if layout.axes]
    inside = (layout for layout in cut if any(part.axes for part in layout.cuts[1:]))
    return next(inside, cut[0] if cut else layouts[0])


@lru_cache(maxsize=4096)
def _joined(operands: tuple[tuple[torch.Size, torch.dtype], ...], dim: int) -> tuple[torch.Size, torch.dtype]:
    """The shape and type that torch would return, or its error; cached, since a probe takes half a millisecond."""
    whole = torch.cat([probe_of(shape, dtype) for shape, dtype in operands], dim)
    return whole.shape, whole.dtype


def _placed(x: Sharded, work: Layout, dim: int, offset: int) -> torch.Tensor:
    """The part of `x` in this rank's box of the result."""
    maps: list[DimMap] = [Same()] * x.dim()
    maps[dim] = Placed(offset, work.shape[dim])
    return fetch(x, work, tuple(maps))


@implements(torch.stack)
def stack(tensors: Sequence[Sharded | torch.Tensor], dim: int = 0) -> Sharded:
    """Operands along a new dim, which is not cut."""
    mesh = next(t.mesh for t in tensors if isinstance(t, Sharded))
    return cat([unsqueeze(on_mesh(t, mesh), dim) for t in tensors], dim)


def _register(function: Callable[..., Any]) -> None:
    @implements(function, takes_folded=True)
    def split(x: Sharded, *args: Any, **kwargs: Any) -> tuple[Sharded, ...]:
        whole = probe(x)
        pieces = function(whole, *args, **kwargs)
        if x.layout.folds and {tuple(piece.shape) for piece in pieces} == {(*x.shape[:-1], x.layout.shape[-1])}:
            return unbind(x.unfolded, -2)
        x = x.in_one_piece()
        dim = next((d for d in range(x.dim()) if any(p.shape[d] != x.shape[d] for p in pieces)), 0)
        # Each piece is a view; its storage offset says where it begins.
        starts = (piece.storage_offset() // whole.stride(dim) for piece in pieces)
        return tuple(narrow(x, dim, start, p.shape[dim]) for start, p in zip(starts, pieces, strict=True))


for _function in SPLITTING:
    _register(_function)


@implements(torch.unbind, _T.unbind)
def unbind(input: Sharded, dim: int = 0) -> tuple[Sharded, ...]:  # noqa: A002 - torch's name
    """The slices along a dim as separate tensors; one exchange makes the dim whole first."""
    dim %= input.dim()
    whole = input.redistribute(input.layout.with_whole([dim])) if input.layout.is_cut(dim) else input
    layout = Layout(input.mesh.mesh, [cut for d, cut in enumerate(whole.layout.cuts) if d != dim])
    return tuple(Sharded(piece, layout, input.mesh) for piece in whole.local.unbind(dim))
