"""Tensors as the kernels take them."""

from __future__ import annotations

import torch

from convmesh.kernels.memory_format import CHANNELS_LAST
from convmesh.kernels.tuned.conv_shape import ConvShape


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.dim()])


def output_like(x: torch.Tensor, shape: ConvShape) -> torch.Tensor:
    """Memory for the output of a convolution of `x`."""
    sizes = (shape.samples, shape.filters, *shape.out[5 - x.dim() :])
    return torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=CHANNELS_LAST[x.dim()])


def precision(x: torch.Tensor) -> str:
    """For products in float32, as torch is set for convolutions; other types have only one precision."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32 else "ieee"
