"""Normalisations of channels, run dry for any number of them.

What a batch normalisation does to one channel, it does to each. Networks have few shapes of space and many numbers of
channels, so that most of its calls need no dry run of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from convmesh.dist import OpenMesh
from convmesh.kernels.memory_format import channels_last_order
from convmesh.layout import Layout
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.lowering.any_extent import MANY, MOST_ELEMENTS, uncut
from convmesh.lowering.dry_call import DryCall
from convmesh.lowering.dry_values import Dry
from convmesh.ops.norm.rows import pieces_of_channel
from convmesh.private_torch.module_tables import buffers_of, give_tables, parameters_of


class AnyChannels(NamedTuple):
    """A call on `MANY` channels."""

    call: DryCall
    leaves: tuple[Any, ...]
    channels: int


def any_channels(call: DryCall, leaves: Sequence[Any], mesh: OpenMesh) -> AnyChannels | None:
    """The call for `MANY` channels; None if it may depend on their number otherwise than by counting."""
    many = call.with_channels(MANY) if len(leaves) == 1 and mesh.stands_for == "cuda" else None
    if many is None or not _counts_channels(leaves[0], leaves[0].layout.box(mesh.rank).shape):
        return None
    x: Dry = leaves[0]
    return AnyChannels(many, (x.lying_in(_with_channels(x.layout)),), x.layout.shape[1])


def _counts_channels(x: Dry, shape: tuple[int, ...]) -> bool:
    """Whether all that is done for a shard is so much for each channel; a single one may lie in memory in any order."""
    channels, each = shape[1], math.prod((shape[0], *shape[2:]))
    is_last = bool(x.order) and x.order == channels_last_order(len(shape))
    if channels < 2 or not 0 < each <= MOST_ELEMENTS or x.layout.cuts[1] != uncut(channels):
        return False
    return (is_last or not x.order) and pieces_of_channel(shape, is_last) < 2


def norm_like(module: nn.Module, channels: int) -> nn.Module:
    """A norm like another, without data, of so many channels."""
    made: Any = copy(module)
    tables = parameters_of(module), buffers_of(module)
    give_tables(made, *({name: _lengthened(tensor, channels) for name, tensor in table.items()} for table in tables))
    made.num_features = channels
    norm: nn.Module = made
    return norm


def _lengthened(tensor: Any, channels: int) -> Any:
    if tensor is None or not tensor.dim():
        return tensor
    made = torch.empty(channels, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


@lru_cache(maxsize=LAYOUTS_KEPT)
def _with_channels(layout: Layout) -> Layout:
    return layout.replacing({1: uncut(MANY)})
