"""Activations and weights of each layer, which decide between parallel strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

BATCH = 2
"""Batch norm refuses a single value per channel."""


@dataclass(frozen=True, slots=True)
class LayerSize:
    """A layer's output shape for one sample, and its number of weights."""

    name: str
    output: tuple[int, ...]
    parameters: int

    @property
    def data(self) -> int:
        return math.prod(self.output)


def layer_sizes(net: nn.Module, sample: Sequence[int]) -> list[LayerSize]:
    """One row per stage (direct child) of `net`, in execution order."""
    outputs = output_shapes(net, sample)
    children = dict(net.named_children())
    counts = {name: sum(p.numel() for p in child.parameters()) for name, child in children.items()}
    return [LayerSize(name, shape, counts[name]) for name, shape in outputs.items() if name in children]


def output_shapes(net: nn.Module, sample: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Module name → shape of its last output for one sample. A network on the meta device computes nothing."""
    shapes: dict[str, tuple[int, ...]] = {}
    hooks = [layer.register_forward_hook(partial(_note, shapes, name)) for name, layer in net.named_modules()]
    weight = next(net.parameters())
    try:
        with torch.no_grad():
            net(torch.zeros(BATCH, *sample, device=weight.device, dtype=weight.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _note(shapes: dict[str, tuple[int, ...]], name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
    del layer, inputs
    if isinstance(output, torch.Tensor):
        shapes[name] = tuple(output.shape[1:])
