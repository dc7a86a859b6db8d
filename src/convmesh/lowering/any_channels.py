"""Dry runs that serve any number of channels.

Batch norms, pools and elementwise functions treat every channel alike; a convolution sums over its input channels.
Networks have few spatial shapes and many numbers of channels, so most such calls need no dry run of their own.
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
from convmesh.lowering.any_extent import MANY, MOST_BYTES, MOST_ELEMENTS, counts_alone, uncut
from convmesh.lowering.dry_call import DryCall
from convmesh.lowering.dry_values import Dry
from convmesh.ops.norm.rows import pieces_of_channel
from convmesh.private_torch.module_tables import buffers_of, give_tables, parameters_of

LARGEST_ITEM = 8
"""Most bytes of an element."""


class AnyChannels(NamedTuple):
    """A call on `MANY` channels."""

    call: DryCall
    leaves: tuple[Any, ...]
    channels: int


def any_channels(call: DryCall, leaves: Sequence[Any], mesh: OpenMesh) -> AnyChannels | None:
    """The call for `MANY` channels; None if its result may not be linear in their number."""
    given = [leaf for leaf in leaves if isinstance(leaf, Dry)]
    if not counts_alone(mesh) or not given or not all(_counts_channels(x, mesh) for x in given):
        return None
    if call.finds_statistics and _pieces(given[0], mesh) > 1:
        return None
    others = given[1:] if call.joins_channels else []
    if others and [leaf for leaf in leaves if not isinstance(leaf, Dry)] != [1]:
        return None  # they are joined along another dim
    channels = given[0].layout.shape[1]
    is_alike = others or all(x.layout.shape[1] == channels for x in given)
    fixed = call.filters + sum(x.layout.shape[1] for x in others)
    if not is_alike or fixed * max(_elements(x, mesh) for x in given) * LARGEST_ITEM > MOST_BYTES:
        return None
    many = call.with_channels(MANY)
    if many is None:
        return None
    counted = {id(x) for x in (given[:1] if others else given)}
    wide = tuple(x.lying_in(_with_channels(x.layout)) if id(x) in counted else x for x in leaves)
    return AnyChannels(many, wide, channels)


def _counts_channels(x: Dry, mesh: OpenMesh) -> bool:
    """Whether work on a shard is proportional to its channels; a single one has an ambiguous memory order."""
    shape = x.layout.box(mesh.rank).shape
    if len(shape) < 2 or shape[1] < 2 or x.layout.cuts[1] != uncut(shape[1]):
        return False
    return 0 < _elements(x, mesh) <= MOST_ELEMENTS and (not x.order or _is_last(x))


def _is_last(x: Dry) -> bool:
    """Whether channels are innermost in memory."""
    return bool(x.order) and x.order == channels_last_order(len(x.order))


def _pieces(x: Dry, mesh: OpenMesh) -> int:
    """The number of pieces in which a norm reads a channel; it depends on the number of channels."""
    return pieces_of_channel(x.layout.box(mesh.rank).shape, _is_last(x))


def _elements(x: Dry, mesh: OpenMesh) -> int:
    """Elements per channel of this rank's shard."""
    samples, _, *space = x.layout.box(mesh.rank).shape
    return samples * math.prod(space)


def conv_like(module: nn.Module, channels: int) -> nn.Module:
    """A copy of a convolution, without data, for `channels` input channels."""
    made: Any = copy(module)
    parameters = parameters_of(module)
    filters, _, *kernel = made.weight.shape
    weight = torch.empty(filters, channels, *kernel, dtype=made.weight.dtype, device="meta")
    give_tables(made, {**parameters, "weight": nn.Parameter(weight, made.weight.requires_grad)}, buffers_of(module))
    made.in_channels = channels
    conv: nn.Module = made
    return conv


def norm_like(module: nn.Module, channels: int) -> nn.Module:
    """A copy of a norm, without data, for `channels` channels."""
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
