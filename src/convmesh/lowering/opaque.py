"""Modules that the tracer could not look into: they run on whole samples, each rank on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from convmesh.dist import OpenMesh, copy_over
from convmesh.errors import UnsupportedError
from convmesh.graph import Node
from convmesh.layout import Layout
from convmesh.layout.layout import Cut
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch import tree_map
from convmesh.private_torch.module_tables import call_with


def is_opaque(kind: str, module: object) -> bool:
    """Whether a call runs on whole samples unseen: a user's own module that could not be traced.

    Torch's modules and functions without a split version are refused instead: some mix samples, or do not have them in
    the first dim, and would be silently wrong.
    """
    return kind == "opaque" and isinstance(module, nn.Module) and not type(module).__module__.startswith("torch.")


_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules whose output for a sample depends on the others."""


def mixes_samples(module: nn.Module, spec: Node) -> bool:
    """Whether a closed module needs the whole batch: statistics or branches of a part of it would be others."""
    return bool(spec.options.get("whole_batch")) or any(isinstance(part, _STATISTICS) for part in module.modules())


def uncut(x: Sharded) -> Sharded:
    """`x` with nothing cut."""
    return x.with_whole(range(x.dim()))


def by_samples(x: Sharded) -> Sharded:
    """`x` with nothing cut but its samples."""
    return x.with_whole([dim for dim in range(1, x.dim()) if x.layout.is_cut(dim)])


def opaque_layout(mesh_layout: Layout, shape: tuple[int, ...], layer: str) -> Layout:
    """The layout of an opaque module's output, whose samples are its input's."""
    samples: Cut = mesh_layout.cuts[0]
    if not shape or shape[0] != samples.partition.extent:
        if not samples.axes:
            return Layout.of(mesh_layout.mesh, shape)
        raise UnsupportedError(
            f"layer {layer!r} cannot be looked into, so only its samples can be cut, but it makes a tensor of shape "
            f"{shape} from {samples.partition.extent} samples; leave its samples whole, or make it traceable."
        )
    return Layout.of(mesh_layout.mesh, shape).replacing({0: samples})


def run_opaque(module: nn.Module, spec: Node, *args: Any, **kwargs: Any) -> Any:
    """The module on this rank's samples, or on all of them if it mixes them."""
    lead: list[Sharded] = []
    arranged = uncut if mixes_samples(module, spec) else by_samples

    def local(value: Any) -> Any:
        if not isinstance(value, Sharded):
            return value
        lead.append(arranged(value))
        return lead[-1].local

    here = tree_map(local, (args, kwargs), is_leaf=lambda v: isinstance(v, Sharded))
    if not lead:
        return module(*here[0], **here[1])
    first = lead[0]
    axes = first.mesh.weight_axes(first.layout.axes)
    weights = _weights_over(module, first.mesh, axes) if axes else {}
    result = call_with(module, weights, *here)
    return tree_map(lambda y: _wrapped(y, first, spec.layer), result)


def _weights_over(module: nn.Module, mesh: OpenMesh, axes: tuple[str, ...]) -> dict[str, Any]:
    """A module's parameters by name; backward sums their gradients over `axes`."""
    parameters = dict(module.named_parameters())
    return dict(zip(parameters, copy_over(mesh, axes, *parameters.values()), strict=True))


def _wrapped(y: Any, like: Sharded, layer: str) -> Any:
    if not isinstance(y, torch.Tensor):
        return y
    samples = like.shape[0] if y.dim() and y.shape[0] == like.local.shape[0] else 0
    shape = (samples, *y.shape[1:]) if samples else tuple(y.shape)
    return Sharded(y, opaque_layout(like.layout, shape, layer), like.mesh)
