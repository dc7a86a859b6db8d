"""Cut weights: DTensors, so that optimisers, clipping and checkpoints recognise them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from convmesh.dist.open_mesh import OpenMesh
from convmesh.errors import UnsupportedError
from convmesh.layout import Box, Layout, Mesh
from convmesh.layout.layout import chunked_cut
from convmesh.private_torch.dtensors import blocks_of, cut_dim, in_blocks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Cuts = Mapping[int, tuple[str, ...]]

JOIN = "+"
"""Joins the names of axes that torch sees as one."""

_opened_as: weakref.WeakValueDictionary[DeviceMesh, OpenMesh] = weakref.WeakValueDictionary()
"""Open meshes by torch's views of them. Equal views have the same ranks, so either mesh will do."""


def cut_weight(weight: torch.Tensor, mesh: OpenMesh, cuts: Cuts, blocks: int = 1) -> DTensor:
    """This rank's shard of a whole weight whose dims are cut by axes, outermost first; differentiable.

    A DTensor cuts a dim by the axes of its device mesh in order, so that mesh lists them in the order of `cuts`, after
    all other axes as one. With `blocks`, the first dim is that many blocks, one after the other, and each is cut.
    """
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard  # slow to import

    names = _ordered(mesh, cuts)
    by_name = {name: dim for dim, axes in cuts.items() for name in axes}
    placements: list[Placement] = [Shard(by_name[n]) if n in by_name else Replicate() for n in names]
    # A clone, so that the whole weight can be freed.
    if blocks == 1:
        local = weight[_box(weight.shape, mesh, cuts).slices()].clone()
    else:
        box = block_layout(weight.shape, mesh.mesh, cuts, blocks).box(mesh.rank)
        local = weight.unflatten(0, (blocks, -1))[box.slices()].flatten(0, 1).clone()
        pairs = zip(names, placements, strict=True)
        placements = [in_blocks(0, blocks) if by_name.get(name) == 0 else place for name, place in pairs]
    return DTensor.from_local(
        local, device_mesh(mesh, names), placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def shard_of(param: DTensor, mesh: OpenMesh) -> torch.Tensor:
    """This rank's shard of a cut weight; refused if it was cut for another mesh, whose shards would not fit."""
    # Compared by value: torch's caches return results on whichever of two equal meshes came first.
    if param.device_mesh not in mesh.device_meshes.values():
        raise UnsupportedError(
            f"a DTensor on {param.device_mesh} is no cut weight of {mesh.mesh}; "
            "cut weights with `convmesh.cut_channels`."
        )
    return param.to_local()


def open_mesh_of(param: DTensor) -> OpenMesh | None:
    """The mesh that a weight was cut over, while it is open."""
    return _opened_as.get(param.device_mesh)


def local_shape(shape: Sequence[int], mesh: OpenMesh, cuts: Cuts) -> tuple[int, ...]:
    """The shape of this rank's shard of a weight."""
    return _box(shape, mesh, cuts).shape


def weight_layout(shape: Sequence[int], mesh: Mesh, cuts: Cuts) -> Layout:
    """The layout of a cut weight: a DTensor cuts dims into chunks, whatever the axes."""
    return Layout(mesh, [chunked_cut(mesh, n, cuts.get(dim, ())) for dim, n in enumerate(shape)])


def block_layout(shape: Sequence[int], mesh: Mesh, cuts: Cuts, blocks: int) -> Layout:
    """The layout of a weight whose blocks are each cut, with the blocks as a separate first dim."""
    return weight_layout((blocks, shape[0] // blocks, *shape[1:]), mesh, {d + 1: axes for d, axes in cuts.items()})


def weight_blocks(weight: DTensor) -> int:
    """The number of blocks in the first dim of a cut weight."""
    return max(map(blocks_of, weight.placements))


def cuts_of(weight: DTensor) -> dict[int, tuple[str, ...]]:
    """The axes that cut each dim, outermost first: the inverse of `cut_weight`."""
    cuts: dict[int, tuple[str, ...]] = {}
    for name, placement in zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=True):
        if (dim := cut_dim(placement)) is not None:
            cuts[dim] = (*cuts.get(dim, ()), name)
    return cuts


def _box(shape: Sequence[int], mesh: OpenMesh, cuts: Cuts) -> Box:
    return weight_layout(shape, mesh.mesh, cuts).box(mesh.rank)


def device_mesh(mesh: OpenMesh, names: tuple[str, ...]) -> DeviceMesh:
    """torch's view of an open mesh: the same process groups, with the axes in the order of `names`."""
    if names not in mesh.device_meshes:
        joined = [name.split(JOIN) for name in names]
        order = [list(mesh.mesh.axes).index(axis) for axes in joined for axis in axes]
        extents = [math.prod(mesh.mesh.axes[axis] for axis in axes) for axes in joined]
        ranks = torch.tensor(mesh.world_ranks).view(*mesh.mesh.axes.values()).permute(order).reshape(extents)
        groups = [mesh.group(axes) for axes in joined]
        mesh.device_meshes[names] = DeviceMesh.from_group(groups, mesh.device.type, mesh=ranks, mesh_dim_names=names)
    _opened_as[mesh.device_meshes[names]] = mesh
    return mesh.device_meshes[names]


def _ordered(mesh: OpenMesh, cuts: Cuts) -> tuple[str, ...]:
    """The axes that do not cut a weight, as one, then those that do.

    Before an operator first runs on a DTensor, torch goes through all placements on all axes of its mesh: every further
    axis makes an optimiser's first step take about three times as long.
    """
    cutting = [name for axes in cuts.values() for name in axes]
    others = [name for name in mesh.mesh.axes if name not in cutting]
    return (*([JOIN.join(others)] if others else []), *cutting)
