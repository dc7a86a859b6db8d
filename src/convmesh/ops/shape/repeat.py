"""Split `expand`, `repeat` and similar functions: values that appear several times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from convmesh.layout import Cut, Layout, Partition
from convmesh.ops.core.probe import probe
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh

_T = torch.Tensor


def _register_expanding(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
        # torch itself reads the sizes (-1, one tuple or many numbers, another tensor), on a tensor without data.
        plain = [probe(arg) if isinstance(arg, Sharded) else arg for arg in args]
        return expand_to(x, tuple(function(probe(x), *plain, **kwargs).shape))


for _function in (_T.expand, _T.expand_as, torch.broadcast_to, _T.broadcast_to):
    _register_expanding(_function)


def expand_to(x: Sharded, shape: tuple[int, ...]) -> Sharded:
    """`x` in a larger shape; new and widened dims are not cut, so nothing travels unless a dim of extent 1 was cut."""
    lead = len(shape) - x.dim()
    x = x.with_whole([d for d in range(x.dim()) if x.shape[d] != shape[lead + d]])
    cuts = {lead + d: cut for d, cut in enumerate(x.layout.cuts) if cut.axes}
    layout = Layout.of(x.mesh.mesh, shape).replacing(cuts)
    return Sharded(x.local.expand(layout.box(x.mesh.rank).shape), layout, x.mesh)


@implements(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> list[Sharded]:
    """All tensors in their common shape."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    shape = tuple(torch.broadcast_shapes(*(x.shape for x in given)))
    mesh = next(x.mesh for x in given if isinstance(x, Sharded))
    return [expand_to(on_mesh(x, mesh), shape) for x in given]


@implements(_T.repeat, torch.tile, _T.tile)
def repeat(x: Sharded, *sizes: Any, **named: Any) -> Sharded:
    """`x` side by side with itself; dims that are repeated are made whole first."""
    (given,) = named.values() or ((),)
    times = _listed(sizes or (given,))
    times = [1] * (x.dim() - len(times)) + times  # for `tile`; `repeat` gives a number for every dim
    lead = len(times) - x.dim()
    x = x.with_whole([d for d in range(x.dim()) if times[lead + d] != 1])
    local = x.local.repeat(*times)
    cuts = {lead + d: cut for d, cut in enumerate(x.layout.cuts) if cut.axes}
    shape = [n * m for n, m in zip((*[1] * lead, *x.shape), times, strict=True)]
    return Sharded(local, Layout.of(x.mesh.mesh, shape).replacing(cuts), x.mesh)


def _listed(sizes: Sequence[Any]) -> list[int]:
    return [int(n) for n in (sizes if isinstance(sizes[0], int) else sizes[0])]


@implements(torch.repeat_interleave, _T.repeat_interleave)
def repeat_interleave(input: Sharded, repeats: int, dim: int | None = None, **options: Any) -> Sharded:  # noqa: A002
    """Repeat every element of a dim consecutively: nothing travels, and the cut moves with the elements."""
    torch.repeat_interleave(probe(input), repeats, dim, **options)
    x: Any = input if dim is not None else input.reshape(-1)
    dim = 0 if dim is None else dim % x.dim()
    axes, partition = x.layout.cuts[dim]
    cut = Cut(axes, Partition([bound * repeats for bound in partition.bounds]))
    return Sharded(x.local.repeat_interleave(repeats, dim), x.layout.replacing({dim: cut}), x.mesh)
