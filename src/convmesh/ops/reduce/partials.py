"""Common parts of every reduction: its dims, the layout of its result, and gathering partial results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from convmesh.layout import Cut, Layout, Partition
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded

Dims = int | Sequence[int] | None

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "input": "x", "self": "x"}


def reduces(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a reduction; like torch, it also accepts NumPy's argument names."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        @implements(*functions)
        @functools.wraps(handler)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            return handler(*args, **{_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()})

        return renamed

    return register


def reduced_dims(x: Sharded, dim: Dims) -> tuple[int, ...]:
    """The dims of a reduction, as non-negative numbers; all of them for None."""
    requested = (dim,) if isinstance(dim, int) else tuple(dim or range(x.dim()))
    for d in requested:
        if not -max(1, x.dim()) <= d < max(1, x.dim()):
            raise IndexError(f"`dim` (={d}) must be from {-x.dim()} to {x.dim() - 1} for a tensor of {x.dim()} dims.")
    dims = tuple(sorted(d % x.dim() for d in requested)) if x.dim() else ()
    if len(set(dims)) < len(dims):
        raise RuntimeError(f"`dim` (={requested}) names a dim more than once.")
    return dims


def reduced(x: Sharded, local: torch.Tensor, dims: Sequence[int], keepdim: bool) -> Sharded:
    """The result of a reduction: `local` has `dims` reduced to extent 1 over all ranks; dropped unless `keepdim`."""
    one = Cut((), Partition.even(1, 1))
    cuts = [one if dim in dims else cut for dim, cut in enumerate(x.layout.cuts)]
    if not keepdim:
        local = local.reshape([n for dim, n in enumerate(local.shape) if dim not in dims])
        cuts = [cut for dim, cut in enumerate(cuts) if dim not in dims]
    return Sharded(local, Layout(x.mesh.mesh, cuts), x.mesh)


def has_none_of(x: Sharded, dims: Sequence[int]) -> bool:
    """Whether this rank has nothing to reduce, because its part of one of `dims` is empty."""
    return any(x.local.shape[dim] == 0 for dim in dims)


def no_partial(x: Sharded, dims: Sequence[int]) -> torch.Tensor:
    """The partial result of a rank that has nothing to reduce: empty, but connected to its shard for autograd."""
    local = x.local
    for dim in dims:
        local = local.narrow(dim, 0, min(1, local.shape[dim]))
    return local


def side_by_side(x: Sharded, partial: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """All ranks' partial results of reducing `dims`, on each rank, without empty parts; differentiable."""
    cuts = {dim: _one_for_each_part(x.layout.cuts[dim]) for dim in dims}
    listed = Sharded(partial, x.layout.replacing(cuts), x.mesh)
    return listed.redistribute(listed.layout.with_whole(dims)).local


def _one_for_each_part(cut: Cut) -> Cut:
    parts = (cut.partition.span(part) for part in range(cut.partition.parts))
    return Cut(cut.axes, Partition.of_sizes([min(1, part.extent) for part in parts]))
