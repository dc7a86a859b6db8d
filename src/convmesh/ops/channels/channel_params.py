"""Per-channel parameters, for inputs whose channels may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch

from convmesh.dist import weights_over
from convmesh.dist.cut_weights import shard_of
from convmesh.layout import Layout
from convmesh.ops.channels.undecided_weight import PlannedWeight
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch.dtensors import is_dtensor

Param = torch.Tensor | None


def channel_params(x: Sharded, *params: Param) -> tuple[Param, ...]:
    """The values for this rank's channels; gradients are summed over the ranks that cut samples and space.

    Shards (DTensors) must be cut like the channels. The rank slices a whole parameter and shares its gradient.
    """
    channel_axes = x.layout.axes_of([1])
    others = tuple(name for name in x.layout.axes if name not in channel_axes)
    return weights_over(x.mesh, others, *(_part(x, param, channel_axes) for param in params))


def channel_buffers(x: Sharded, *buffers: Param) -> tuple[Param, ...]:
    """The values for this rank's channels, to read or update in place; for whole buffers they are copies."""
    return tuple(_copied(_part(x, buffer, ())) if _is_sliced(buffer, x) else _part(x, buffer, ()) for buffer in buffers)


def _copied(part: Param) -> Param:
    return None if part is None else part.clone()


@torch.no_grad()
def share_buffers(x: Sharded, buffers: Sequence[Param], parts: Sequence[Param]) -> None:
    """Write every rank's updated `parts` into whole buffers."""
    whole = [buffer for buffer in buffers if _is_sliced(buffer, x)]
    if not whole:
        return
    here = torch.stack([part for part in parts if part is not None])
    layout = Layout.of(x.layout.mesh, (len(whole), x.shape[1])).replacing({1: x.layout.cuts[1]})
    for buffer, gathered in zip(whole, Sharded(here, layout, x.mesh).gather(), strict=True):
        buffer.copy_(gathered)


def _is_sliced(buffer: Param, x: Sharded) -> TypeGuard[torch.Tensor]:
    return buffer is not None and x.layout.is_cut(1) and not (is_dtensor(buffer) or isinstance(buffer, PlannedWeight))


def _part(x: Sharded, param: Param, channel_axes: tuple[str, ...]) -> Param:
    if is_dtensor(param):
        return shard_of(param, x.mesh)
    if param is None or not x.layout.is_cut(1):
        return param
    if isinstance(param, PlannedWeight):
        here = x.box.spans[1].extent
        return torch.empty(here, dtype=param.dtype, device="meta", requires_grad=param.requires_grad)
    (whole,) = weights_over(x.mesh, channel_axes, param)
    assert whole is not None
    return whole[x.box.spans[1].slice()]
