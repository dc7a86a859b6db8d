"""Adds, removes and reorders dims along with their cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from convmesh.layout import Layout
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.ops.core.probe import probe_of
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.shape.index import WHOLE_ONE

_T = torch.Tensor

REORDERING: tuple[Callable[..., Any], ...] = (
    torch.permute, _T.permute, torch.transpose, _T.transpose, torch.swapaxes, _T.swapaxes, torch.swapdims, _T.swapdims,
    torch.movedim, _T.movedim, torch.moveaxis, _T.moveaxis, torch.t, _T.t,
)  # fmt: skip


def _register(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
        named = tuple((name, _fixed(value)) for name, value in kwargs.items())
        order = _order(function, x.dim(), tuple(map(_fixed, args)), named)
        return Sharded(x.local.permute(order), _reordered(x.layout, order), x.mesh)


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _order(function: Callable[..., Any], dims: int, args: tuple[Any, ...], named: tuple[Any, ...]) -> tuple[int, ...]:
    """The order that a call puts `dims` dims in."""
    distinct = probe_of([2 + dim for dim in range(dims)])  # the extent identifies the dim
    return tuple(extent - 2 for extent in function(distinct, *args, **dict(named)).shape)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _reordered(layout: Layout, order: tuple[int, ...]) -> Layout:
    return Layout(layout.mesh, [layout.cuts[dim] for dim in order])


for _function in REORDERING:
    _register(_function)


@implements(torch.unsqueeze, _T.unsqueeze)
def unsqueeze(input: Sharded, dim: int) -> Sharded:  # noqa: A002 - torch's name
    """A new dim of extent 1, not cut."""
    local = input.local.unsqueeze(dim)
    cuts = list(input.layout.cuts)
    cuts.insert(dim % local.dim(), WHOLE_ONE)
    return Sharded(local, Layout(input.mesh.mesh, cuts), input.mesh)


@implements(torch.squeeze, _T.squeeze)
def squeeze(input: Sharded, dim: int | Sequence[int] | None = None) -> Sharded:  # noqa: A002
    """Remove dims of extent 1; the axes that cut a removed dim now replicate."""
    requested = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    removed = sorted({d % input.dim() for d in requested if input.shape[d] == 1})
    whole = input.redistribute(input.layout.with_whole([d for d in removed if input.layout.is_cut(d)]))
    kept = [cut for d, cut in enumerate(whole.layout.cuts) if d not in removed]
    return Sharded(whole.local.squeeze(tuple(removed)), Layout(input.mesh.mesh, kept), input.mesh)
