"""Operators that need all of one dim: cumulative sums, sorting, sliding windows, picking by index.

A cut dim is made whole first, by the rule of reshapes. Picking by a tensor of indices is a product as `contraction`
defines it: the picked dim is whole, and the dims that indices and values share stay cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from convmesh.errors import UnsupportedError
from convmesh.layout import Cut, Layout, Partition
from convmesh.ops.core.probe import probe
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.product.contraction import Contraction, Labels, contract
from convmesh.ops.shape.reshape import make_whole
from convmesh.private_torch import tree_map

_T = torch.Tensor

_Each = TypeVar("_Each")

ALONG_FIRST: tuple[Callable[..., Any], ...] = (
    torch.cumsum, _T.cumsum, torch.cumprod, _T.cumprod, torch.logcumsumexp, _T.logcumsumexp, torch.cummax, _T.cummax,
    torch.cummin, _T.cummin, torch.sort, _T.sort, torch.argsort, _T.argsort, _T.unfold, torch.diff, _T.diff,
)  # fmt: skip
"""Functions of a tensor and a dim, by default the last; `diff` takes its order before the dim."""

ALONG_SECOND: tuple[Callable[..., Any], ...] = (torch.topk, _T.topk)
"""Functions of a tensor, a number and a dim."""


def _register_along(function: Callable[..., Any], place: int) -> None:
    @implements(function)
    def split(x: Sharded, *args: Any, **kwargs: Any) -> Any:
        function(probe(x), *args, **kwargs)
        dim = kwargs.get("dim", kwargs.get("dimension", args[place] if len(args) > place else -1))
        return local_result(make_whole(x, [dim % x.dim()]) if x.dim() else x, function, args, kwargs)


def local_result(x: Sharded, function: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
    """A function applied to this rank's part of `x`, whose cut dims it neither changes nor mixes."""
    return tree_map(lambda y: _wrapped(x, y), function(x.local, *args, **(kwargs or {})))


def _wrapped(x: Sharded, local: torch.Tensor) -> Sharded:
    cuts = [
        x.layout.cuts[dim] if dim < x.dim() and x.layout.is_cut(dim) else Cut((), Partition.even(extent, 1))
        for dim, extent in enumerate(local.shape)
    ]
    return Sharded(local, Layout(x.mesh.mesh, cuts), x.mesh)


for _function in ALONG_FIRST:
    _register_along(_function, 1 if _function in (torch.diff, _T.diff) else 0)
for _function in ALONG_SECOND:
    _register_along(_function, 1)


def _register_triangle(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(x: Sharded, diagonal: int = 0) -> Any:
        """A triangle of each matrix, made whole first."""
        function(probe(x), diagonal)
        return local_result(make_whole(x, [x.dim() - 2, x.dim() - 1]), function, (diagonal,))


for _function in (torch.tril, _T.tril, torch.triu, _T.triu):
    _register_triangle(_function)


@implements(F.unfold)
def unfold(input: Sharded, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 - torch's name
    """Windows as columns, from whole samples."""
    F.unfold(probe(input), *args, **kwargs)
    return local_result(make_whole(input, range(1, input.dim())), F.unfold, args, kwargs)


@implements(F.fold)
def fold_columns(input: Sharded, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    """The adjoint of `unfold`."""
    F.fold(probe(input), *args, **kwargs)
    return local_result(make_whole(input, range(1, input.dim())), F.fold, args, kwargs)


@implements(torch.index_select, _T.index_select)
def index_select(input: Any, dim: int, index: Any) -> Sharded:  # noqa: A002
    """The listed indices of a dim."""
    torch.index_select(probe(input), dim, probe(index))
    dim %= input.dim()
    labels = _labels(input.dim())
    picked = _with(labels, dim, "picked")
    terms = Contraction((labels, ("picked",)), picked, frozenset({labels[dim]}))
    return contract(terms, _on_one_mesh(input, index), lambda x, i: torch.index_select(x, dim, i))


@implements(torch.take_along_dim, _T.take_along_dim)
def take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Sharded:  # noqa: A002
    """`gather`, with the other dims of `input` and `indices` broadcast; without `dim`, of both as one row."""
    torch.take_along_dim(probe(input), probe(indices), dim)
    if dim is None:
        return gather(input.flatten(), 0, indices.flatten())
    dim %= input.dim()
    common = torch.broadcast_shapes(*(_with(tuple(x.shape), dim, 1) for x in (input, indices)))
    values, places = (x.expand(_with(tuple(common), dim, x.shape[dim])) for x in (input, indices))
    return gather(values, dim, places)


@implements(torch.gather, _T.gather)
def gather(input: Any, dim: int, index: Any) -> Sharded:  # noqa: A002
    """The value along `dim` that each element of `index` selects."""
    torch.gather(probe(input), dim, probe(index))
    dim %= input.dim()
    for other in range(input.dim()):
        if other != dim and index.shape[other] < input.shape[other]:
            input = input.narrow(other, 0, index.shape[other])  # noqa: A001
    labels = _labels(input.dim())
    picked = _with(labels, dim, "picked")
    terms = Contraction((labels, picked), picked, frozenset({labels[dim]}))
    return contract(terms, _on_one_mesh(input, index), lambda x, i: torch.gather(x, dim, i))


def _register_scattering(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(input: Any, dim: int, index: Any, src: Any = None, **options: Any) -> Sharded:  # noqa: A002
        """`input` with values written, or added, at `index` along `dim`; that dim is whole on both sides."""
        src = options.pop("value", src)
        has_values = isinstance(src, (Sharded, torch.Tensor))
        plain = probe(src) if has_values else src
        function(probe(input), dim, probe(index), plain, **options)
        tensors = [input, index, src] if has_values else [input, index]
        terms = _scattering(input.shape, index.shape, dim % input.dim(), len(tensors))
        values = () if has_values else (src,)
        return contract(terms, _on_one_mesh(*tensors), lambda x, *rest: function(x, dim, *rest, *values, **options))


for _function in (torch.scatter, _T.scatter, torch.scatter_add, _T.scatter_add):
    _register_scattering(_function)


def _scattering(shape: Sequence[int], index: Sequence[int], dim: int, tensors: int) -> Contraction:
    """Where there are fewer indices than values along a dim, that dim is whole."""
    labels = _labels(len(shape))
    apart = [d for d in range(len(shape)) if d == dim or shape[d] != index[d]]
    listed = tuple(f"listed {d}" if d in apart else label for d, label in enumerate(labels))
    whole = frozenset(name for d in apart for name in (labels[d], listed[d]))
    return Contraction((labels, *[listed] * (tensors - 1)), labels, whole)


@implements(F.grid_sample)
def grid_sample(input: Any, grid: Any, *args: Any, **kwargs: Any) -> Sharded:  # noqa: A002
    """Values at the places that a grid gives: the input's space is whole, the grid's stays cut."""
    F.grid_sample(probe(input), probe(grid), *args, **kwargs)
    space = tuple(f"space {dim}" for dim in range(input.dim() - 2))
    made = tuple(f"made {dim}" for dim in range(input.dim() - 2))
    terms = Contraction(
        (("sample", "channel", *space), ("sample", *made, "place")),
        ("sample", "channel", *made),
        frozenset({*space, "place"}),
    )
    return contract(terms, _on_one_mesh(input, grid), lambda x, at: F.grid_sample(x, at, *args, **kwargs))


@implements(F.one_hot)
def one_hot(tensor: Sharded, num_classes: int = -1) -> Any:
    """A new last dim that is 1 at each value's class."""
    if num_classes < 0:
        raise UnsupportedError(
            f"`one_hot` (num_classes={num_classes}): the number of classes must be given; it is not in the shapes."
        )
    return local_result(tensor, F.one_hot, (num_classes,))


@implements(F.affine_grid)
def affine_grid(theta: Sharded, size: Sequence[int], align_corners: bool | None = None) -> Any:
    """The places that each sample's affine map gives, for this rank's samples."""
    F.affine_grid(probe(theta), [*size], align_corners)
    whole = make_whole(theta, [1, 2])
    return local_result(whole, lambda maps: F.affine_grid(maps, [maps.shape[0], *size[1:]], align_corners))


def _labels(dims: int) -> Labels:
    return tuple(f"dim {dim}" for dim in range(dims))


def _with(values: tuple[_Each, ...], dim: int, value: _Each) -> tuple[_Each, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _on_one_mesh(*tensors: Any) -> list[Sharded]:
    mesh = next(x.mesh for x in tensors if isinstance(x, Sharded))
    return [on_mesh(x, mesh) for x in tensors]
