"""Values to try a network on: the user's sample and the model's weights where they have data, else drawn ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from convmesh.private_torch.dtensors import is_dtensor

Sample = torch.Tensor | tuple[int, ...]

MOST_WEIGHTS = 1 << 27
"""Elements of weights on the meta device for which values are drawn."""


def drawn_input(sample: Sample, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A corner of the user's sample if it is informative, else normal values; whole numbers are zeros."""
    if isinstance(sample, torch.Tensor) and not sample.is_meta:
        corner = sample.detach()[tuple(slice(extent) for extent in shape)].cpu().to(dtype, copy=True)
        # A sample of zeros, or of one value, would hide most mistakes.
        if not corner.is_floating_point() or (corner.isfinite().all() and corner.numel() > 1 and corner.std() > 0):
            return corner
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def has_values(model: nn.Module) -> bool:
    """Whether all weights are here and whole: none on the meta device, none a shard."""
    return all(_is_whole(tensor) and not tensor.is_meta for tensor in weights_by_name(model).values())


def weights_of(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Values for all weights by name: the model's own, not copied, or drawn ones for weights without any.

    None where none can be drawn: shards, tables of whole numbers, or too many.
    """
    named = weights_by_name(model)
    missing = [tensor for tensor in named.values() if tensor.is_meta or not _is_whole(tensor)]
    if any(not _can_be_drawn(tensor) for tensor in missing) or sum(t.numel() for t in missing) > MOST_WEIGHTS:
        return None
    generator = torch.Generator().manual_seed(7)
    return {name: _drawn_weight(t, generator) if t.is_meta else t.detach() for name, t in named.items()}


def weights_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model, each by its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_whole(tensor: torch.Tensor) -> bool:
    return not is_dtensor(tensor)


def _can_be_drawn(tensor: torch.Tensor) -> bool:
    return _is_whole(tensor) and (tensor.is_floating_point() or tensor.ndim == 0)


def _drawn_weight(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A weight about as large as an initialised one, so activations neither vanish nor overflow; counters are 0."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    noise = torch.randn(tensor.shape, generator=generator, device="cpu")
    fan_in = math.prod(tensor.shape[1:])
    return (1 + 0.1 * noise if tensor.ndim < 2 else noise / max(1.0, fan_in) ** 0.5).to(tensor.dtype)


def cotangents(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A random gradient for each output, always the same."""
    return [cotangent(index, output).to(output) for index, output in enumerate(outputs)]


def cotangent(index: int, output: Any) -> torch.Tensor:
    """A random gradient in float64 for the output with that index; `output` has a global shape."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(tuple(output.shape), generator=generator, dtype=torch.float64, device="cpu")
