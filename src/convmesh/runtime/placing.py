"""Between global tensors and this rank's shards: inputs, targets and outputs of a split network."""

from __future__ import annotations

from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.errors import ShapeError
from convmesh.layout import Layout
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch import tree_map

_LAYOUT = "convmesh_layout"
"""The attribute in which a shard that we cut carries its layout: batches of other sizes have other layouts."""


def cut(tensor: torch.Tensor, layout: Layout, mesh: OpenMesh) -> torch.Tensor:
    """This rank's shard of a global tensor, on the mesh's device; it carries its layout."""
    return carrying(tensor[layout.box(mesh.rank).slices()].to(mesh.device, copy=True), layout)


def carrying(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A shard that carries its layout from here on."""
    setattr(local, _LAYOUT, layout)
    return local


def marked(sharded: Sharded) -> torch.Tensor:
    """The shard as a plain tensor that carries its layout."""
    return carrying(sharded.local, sharded.layout)


def on_layout(local: Any, planned: Layout | None, mesh: OpenMesh, name: str) -> Sharded:
    """A shard with its layout: the one it carries, else the planned one, whose shape it must have."""
    if isinstance(local, Sharded):
        return local
    layout = getattr(local, _LAYOUT, None) or planned
    if layout is None:
        raise ShapeError(f"{name} is a plain tensor of unknown layout; cut it with `shard_input` or `shard_target`.")
    box = layout.box(mesh.rank)
    if not isinstance(local, torch.Tensor) or tuple(local.shape) != box.shape:
        given = tuple(local.shape) if isinstance(local, torch.Tensor) else type(local).__name__
        raise ShapeError(
            f"{name} must be rank {mesh.rank}'s shard of shape {box.shape} of a global tensor of shape {layout.shape}, "
            f"not {given}; cut a global tensor with `shard_input` or `shard_target`."
        )
    return Sharded(local, layout, mesh)


def in_view(value: Any, mesh: OpenMesh) -> Any:
    """A nested value with its `Sharded` tensors on another view of their mesh: layers run them with its settings."""
    return tree_map(lambda x: Sharded(x.local, x.layout, mesh) if isinstance(x, Sharded) else x, value)


def for_batch(planned: Layout, shape: tuple[int, ...], name: str) -> Layout:
    """The planned layout for a batch of another size; all other extents must be as planned."""
    if len(shape) != len(planned.shape) or shape[1:] != planned.shape[1:]:
        raise ShapeError(
            f"{name} has shape {shape}, but the plan was made for {planned.shape}, whatever the number of samples; "
            "make a plan for this shape with `cm.plan`."
        )
    return planned.with_shape(shape)
