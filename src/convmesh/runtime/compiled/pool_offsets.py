"""What backward needs of a max-pool: one byte per value, instead of an eight-byte index and the pool's input.

A maximum's offset within its window is small; with the window's place it gives the index.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

_BACKWARD = {
    torch.ops.aten.max_pool2d_with_indices_backward.default: torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool3d_with_indices_backward.default: torch.ops.aten.max_pool3d_with_indices.default,
}

MOST_IN_A_BYTE = 127


@dataclass(frozen=True)
class _Windows:
    """The geometry of a pool's windows, by dim of space."""

    extents: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    paddings: tuple[int, ...]
    dilations: tuple[int, ...]

    @staticmethod
    def of(backward: fx.Node) -> _Windows:
        _, x, size, stride, padding, dilation, _, _ = backward.args
        extents = tuple(x.meta["val"].shape[2:])  # type: ignore[union-attr]
        sizes, strides, paddings, dilations = (
            tuple(given) * (len(extents) // len(given))  # type: ignore[arg-type]
            for given in (size, stride or size, padding, dilation)
        )
        return _Windows(extents, sizes, strides, paddings, dilations)

    def offsets(self, indices: torch.Tensor) -> torch.Tensor:
        """Places within windows, from indices within samples."""
        rest = indices if prod(self.extents) > torch.iinfo(torch.int32).max else indices.to(torch.int32)
        offset = torch.zeros_like(rest)
        for dim in reversed(range(len(self.extents))):
            place = rest % self.extents[dim] - self._begins(rest, dim)
            offset = offset + place // self.dilations[dim] * prod(self.sizes[dim + 1 :])
            rest = rest // self.extents[dim]
        return offset.to(torch.int8)

    def indices(self, offsets: torch.Tensor) -> torch.Tensor:
        """The inverse of `offsets`."""
        rest = offsets.to(torch.int64)
        index = torch.zeros_like(rest)
        for dim in reversed(range(len(self.extents))):
            place = self._begins(rest, dim) + rest % self.sizes[dim] * self.dilations[dim]
            index = index + place * prod(self.extents[dim + 1 :])
            rest = rest // self.sizes[dim]
        return index

    def _begins(self, like: torch.Tensor, dim: int) -> torch.Tensor:
        """Where windows begin in a dim of space, shaped to be added to values of `like`."""
        count, behind = like.shape[2 + dim], len(self.extents) - 1 - dim
        numbers = torch.arange(count, device=like.device, dtype=like.dtype)
        return (numbers * self.strides[dim] - self.paddings[dim]).view(-1, *[1] * behind)


def keep_offsets(graph: fx.Graph) -> None:
    """Let every max-pool's backward work from one byte per value, and from its input's shape alone."""
    for target, pool in _BACKWARD.items():
        for backward in graph.find_nodes(op="call_function", target=target):
            _without_input(backward)
            indices = backward.args[7]
            if _is_of(indices, pool) and prod(_Windows.of(backward).sizes) <= MOST_IN_A_BYTE:
                _keep_bytes(backward, indices)


def _is_of(indices: Any, pool: Any) -> bool:
    """Whether indices come from such a pool in the same step: the windows of others may differ."""
    return indices.target is operator.getitem and indices.args[0].target is pool


def _keep_bytes(backward: fx.Node, indices: fx.Node) -> None:
    windows = _Windows.of(backward)
    with backward.graph.inserting_before(indices.next):
        offsets = _inlined(windows.offsets, indices, indices)
    with backward.graph.inserting_before(backward):
        backward.update_arg(7, _inlined(windows.indices, offsets, backward))


def _without_input(backward: fx.Node) -> None:
    """Kernels look at the shape and format of a pool's input, never at its values."""

    def blank(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.new_empty_strided(value.shape, value.stride(), dtype=value.dtype)

    gradient, x = backward.args[:2]
    value = x.meta["val"]  # type: ignore[union-attr]
    with backward.graph.inserting_before(backward):
        backward.update_arg(1, _inlined(blank, gradient, backward))  # type: ignore[arg-type]


def _inlined(function: Callable[[torch.Tensor], torch.Tensor], given: fx.Node, owner: fx.Node) -> fx.Node:
    """The operators of a function of one tensor, as nodes at the graph's insertion point, in the layer of `owner`."""

    def called(x: torch.Tensor) -> torch.Tensor:  # methods cannot be traced
        return function(x)

    traced = make_fx(called, tracing_mode="fake")(given.meta["val"]).graph
    (x,) = traced.find_nodes(op="placeholder")
    before = {*given.graph.nodes}
    made = given.graph.graph_copy(traced, {x: given})
    assert isinstance(made, fx.Node)
    for node in given.graph.nodes:
        if node not in before:
            node.meta = {**owner.meta, **node.meta}
    return made
