"""Tensors without data, and what a call does with them on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.kernels.memory_format import Order, order_of
from convmesh.layout import Layout
from convmesh.layout.channels import ChannelSplit
from convmesh.ops.core.sharded import Sharded
from convmesh.plans import Held, Saved, Step
from convmesh.plans.fused.flow import NO_FLOW, NodeFlow
from convmesh.private_torch import tree_leaves, tree_map

Axes = tuple[str, ...]
Strides = tuple[int, ...]
"""How a gradient is laid out in memory."""


@dataclass(frozen=True, slots=True)
class Dry:
    """A tensor of a dry run: where it lives, its type, and whether a gradient comes back for it."""

    layout: Layout
    dtype: torch.dtype
    learns: bool
    order: Order = ()
    """Its dims from the outermost in memory to the innermost; empty: as they are numbered."""

    def on(self, mesh: OpenMesh) -> Sharded:
        """This rank's shard, without data."""
        shape = self.layout.box(mesh.rank).shape
        local = torch.empty_permuted(shape, self.order or tuple(range(len(shape))), dtype=self.dtype, device="meta")
        return Sharded(local.requires_grad_(self.learns), self.layout, mesh)

    def lying_in(self, layout: Layout) -> Dry:
        """The same tensor in another layout. `replace` takes five times as long."""
        return self if layout is self.layout else Dry(layout, self.dtype, self.learns, self.order)

    def copied_in(self, layout: Layout) -> Dry:
        """The same tensor as an earlier call arranged it: copies for several ranks add an innermost dim."""
        order = (*self.order, *range(len(self.order), len(layout.cuts))) if self.order else ()
        return Dry(layout, self.dtype, self.learns, order)

    def gradient(self, mesh: OpenMesh, strides: Strides | None) -> torch.Tensor:
        """A gradient of the shard, without data: with the given strides, or laid out like the shard itself."""
        local = self.on(mesh).local.detach()
        return lying(local, strides)


@dataclass(frozen=True)
class DryResult:
    """What a call returns (`Dry` in place of tensors), does and keeps, and the axes that cut its weights' work."""

    value: Any
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved: tuple[Saved, ...]
    sum_axes: tuple[Axes, ...]
    decided: ChannelSplit | None = None
    """The cut of the weight, if it was left to the call."""
    held: Held = field(default_factory=Held)
    weight_steps: int = 0
    """How many of the last steps of backward compute gradients of weights alone."""
    gradients: tuple[Strides | None, ...] = ()
    """By input tensor: the strides of its gradient; None where there is none."""
    moments: tuple[tuple[int, ...], ...] = ()
    """Bytes held in the course of forward, of backward, and of its separate work on weights; `held` has the peaks."""
    flow: NodeFlow = NO_FLOW
    """Which values its computations read and make, if they are for a compiler."""
    counted_from: DryResult | None = field(default=None, repr=False, compare=False)
    """The result for `MANY` that this one was read from."""


def lying(tensor: torch.Tensor, strides: Strides | None) -> torch.Tensor:
    """A tensor like another, with these strides."""
    if strides is None:
        # On tensors without data `empty_like` takes ten times as long.
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return plain if plain.stride() == tensor.stride() else torch.empty_like(tensor)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def dry_of(value: Any) -> Any:
    return mapped(_dry, value)


def _dry(x: Any) -> Any:
    return Dry(x.layout, x.dtype, x.requires_grad, order_of(x.local)) if isinstance(x, Sharded) else x


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A result with the function applied to every leaf; most results are one tensor."""
    return function(value) if isinstance(value, (Dry, Sharded)) else tree_map(function, value)


def dries_in(value: Any) -> list[Dry]:
    """The tensors in nested arguments or results, in order."""
    if isinstance(value, Dry):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Dry)]
