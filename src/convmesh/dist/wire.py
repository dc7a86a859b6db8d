"""Between tensors and the contiguous buffers that backends send."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from convmesh.layout import Region, Span
from convmesh.private_torch.tensor_internals import unseen_view

Slices = tuple[slice, ...]


def take(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The values of a region, in the tensor's own indices: a view if the region is one box."""
    if tensor.is_meta and region.is_box and not _learns(tensor):
        return _box(tensor, region)
    for dim, spans in enumerate(region.dims):
        if len(spans) == 1 and spans[0][0] == 0 and spans[0][1] == tensor.shape[dim]:
            continue
        views = [tensor.narrow(dim, s.start, s.extent) for s in spans]
        tensor = views[0] if len(views) == 1 else torch.cat(views, dim) if views else tensor.narrow(dim, 0, 0)
    return tensor


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its values in memory: torch only marks a conjugate as one."""
    return tensor.resolve_conj() if tensor.is_complex() else tensor


def _box(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The same view in one call, for tensors without values: dry runs of large exchanges take thousands."""
    shape, strides = region.shape, tensor.stride()
    if shape == tensor.shape:
        return tensor
    offset = sum([spans[0].start * step for spans, step in zip(region.dims, strides, strict=True)])
    return unseen_view(tensor, shape, strides, int(tensor.storage_offset()) + offset)


def _learns(tensor: torch.Tensor) -> bool:
    """Whether autograd records it: gradients of slices and of strided views take different operators."""
    return tensor.requires_grad and torch.is_grad_enabled()


def put(tensor: torch.Tensor, region: Region, values: torch.Tensor) -> None:
    """Write `values` into a region."""
    if region.is_box:
        take(tensor, region).copy_(values)
        return
    for there, here in _blocks(region):
        tensor[there].copy_(values[here])


def add(tensor: torch.Tensor, region: Region, values: torch.Tensor) -> None:
    """Add `values` to a region."""
    if region.is_box:
        take(tensor, region).add_(values)
        return
    for there, here in _blocks(region):
        tensor[there].add_(values[here])


def _blocks(region: Region) -> Iterator[tuple[Slices, Slices]]:
    """The boxes of a region, and the place of each among the region's values without gaps."""
    per_dim = [list(zip(spans, _compact(spans), strict=True)) for spans in region.dims]
    for choice in itertools.product(*per_dim):
        yield tuple(s.slice() for s, _ in choice), tuple(c.slice() for _, c in choice)


def _compact(spans: Sequence[Span]) -> list[Span]:
    ends = list(itertools.accumulate((s.extent for s in spans), initial=0))
    return [Span(a, b) for a, b in itertools.pairwise(ends)]
