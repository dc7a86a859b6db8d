"""Per-channel parameters, for inputs whose channels may be cut."""

from __future__ import annotations

import torch

from convmesh.dist import weights_over
from convmesh.dist.cut_weights import shard_of
from convmesh.errors import UnsupportedError
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
    """The values for this rank's channels, to be read or updated in place; whole buffers cannot be sliced."""
    for buffer in buffers:
        if buffer is not None and x.layout.is_cut(1) and not is_dtensor(buffer) and not x.mesh.is_dry:
            raise UnsupportedError(
                "running statistics must be cut like the channels of the input; see `convmesh.cut_channels`."
            )
    return tuple(_part(x, buffer, ()) for buffer in buffers)


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
