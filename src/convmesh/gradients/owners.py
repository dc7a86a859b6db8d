"""Which reducer sums a parameter's gradient, so that a call that is given parameters needs no mesh as well."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from convmesh.dist import OpenMesh
from convmesh.dist.cut_weights import open_mesh_of
from convmesh.private_torch.dtensors import cut_dim, is_dtensor

Axes = tuple[str, ...]
Held = Sequence[tuple[torch.Tensor, Axes]]
"""Tensors whose gradients this rank holds, each with the axes along which ranks hold different parts of it."""


class Owner(Protocol):
    """A reducer as its parameters see it."""

    mesh: OpenMesh
    remembers: bool

    def held(self, parameter: torch.Tensor) -> Held:
        """What this rank holds of a parameter's gradient, and where."""


# Weak on both sides: dropping a network drops its entries.
_owners = WeakTensorKeyDictionary()


def own(parameters: Iterable[torch.Tensor], owner: Owner) -> None:
    """Record who sums the gradients of `parameters`; the latest owner counts."""
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def owner_of(parameter: torch.Tensor) -> Owner | None:
    """The reducer of a parameter, if it has one."""
    known: weakref.ref[Owner] | None = _owners.get(parameter)
    return None if known is None else known()


def mesh_of(parameter: torch.Tensor) -> OpenMesh | None:
    """The mesh over which a parameter is trained: its reducer's, or the one that a weight is cut over."""
    owner = owner_of(parameter)
    if owner is not None:
        return owner.mesh
    return open_mesh_of(parameter) if is_dtensor(parameter) else None


def held_of(parameter: torch.Tensor) -> Held:
    """What this rank holds of a parameter's gradient; without a reducer, the parameter's own."""
    owner = owner_of(parameter)
    return [(parameter, distinct_axes(parameter))] if owner is None else owner.held(parameter)


def distinct_axes(parameter: torch.Tensor) -> Axes:
    """The axes along which ranks hold different parts of a parameter; along the others they hold the same."""
    if not is_dtensor(parameter):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    return tuple(name for name, place in zip(names, parameter.placements, strict=True) if cut_dim(place) is not None)
