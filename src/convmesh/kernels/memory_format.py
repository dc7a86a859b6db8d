"""The order of a tensor's dims in memory: plain, channels innermost, or any other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Order = tuple[int, ...]
"""Dims in memory order, outermost first; empty for the plain order."""

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The format with channels innermost, by number of dims."""


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Channels-last if the tensor is stored that way and is not also plainly contiguous."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor is stored channels-last and is not also plainly contiguous."""
    return memory_format_of(tensor) != torch.contiguous_format


def empty_like_format(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Uninitialised, with the type, device and memory format of `like`."""
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=memory_format_of(like))


def channels_last_order(dims: int) -> Order:
    """The order of a channels-last tensor with `dims` dims; plain if there is no such format."""
    return (0, *range(2, dims), 1) if dims in CHANNELS_LAST else ()


def order_of(tensor: torch.Tensor) -> Order:
    """The order of a tensor's dims in memory."""
    if tensor.is_contiguous():
        return ()
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's strides, with 0 for dims of one index, whose stride does not matter: equal layouts compare equal."""
    return tuple(step if extent > 1 else 0 for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
