"""Which dim of a layer's tensors holds channels, and which hold space.

Convolutions and their like have N, C, then space. Dense layers have N, then space (tokens), and features in the last
dim: those are their channels.
"""

from __future__ import annotations

from convmesh.layout.mesh import space_axes


def channel_dim(dims: int, last: bool) -> int:
    """The dim of the channels, of a tensor with `dims` dims; `last` for dense layers."""
    return dims - 1 if last else 1


def space_dims(dims: int, last: bool) -> dict[str, int]:
    """The dims of space by the axis that each is named for."""
    first = 1 if last else 2
    return {name: dim for dim, name in enumerate(space_axes(dims - 2), start=first)}
