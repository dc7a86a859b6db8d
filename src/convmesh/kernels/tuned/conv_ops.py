"""The kernels as torch operators, so that graphs, tensors without data and autograd know them.

A configuration is passed as numbers: a graph with the operator no longer needs the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from convmesh.kernels.memory_format import CHANNELS_LAST
from convmesh.kernels.tuned.conv_configs import KernelConfig
from convmesh.kernels.tuned.conv_shape import ConvShape


@torch.library.custom_op("convmesh::conv", mutates_args=(), device_types=("cpu", "cuda"))
def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    config: Sequence[int],
) -> torch.Tensor:
    """The convolution, by our kernel."""
    from convmesh.kernels.tuned.conv_launch import convolve

    shape = ConvShape.of(x.shape, weight.shape, stride, padding, dilation)
    return convolve(x, weight, bias, shape, KernelConfig(*config))


@conv.register_fake
def _conv_without_data(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    config: Sequence[int],
) -> torch.Tensor:
    del bias, config
    shape = ConvShape.of(x.shape, weight.shape, stride, padding, dilation)
    sizes = (shape.samples, shape.filters, *shape.out[5 - x.dim() :])
    return x.new_empty(sizes).contiguous(memory_format=CHANNELS_LAST[x.dim()])


@torch.library.custom_op("convmesh::conv_input_gradient", mutates_args=(), device_types=("cpu", "cuda"))
def conv_input_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    config: Sequence[int],
) -> torch.Tensor:
    """The gradient of the input, by our kernel; of `x` only the shape matters."""
    from convmesh.kernels.tuned.conv_launch import input_gradient

    shape = ConvShape.of(x.shape, weight.shape, stride, padding, dilation)
    return input_gradient(grad, weight, shape, KernelConfig(*config))


@conv_input_gradient.register_fake
def _input_gradient_without_data(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    config: Sequence[int],
) -> torch.Tensor:
    del weight, stride, padding, dilation, config
    return grad.new_empty(x.shape).contiguous(memory_format=CHANNELS_LAST[x.dim()])


@torch.library.custom_op("convmesh::conv_weight_gradient", mutates_args=(), device_types=("cpu", "cuda"))
def conv_weight_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    has_bias: bool,
    config: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of weight and bias, by our kernel; of `weight` only the shape matters."""
    from convmesh.kernels.tuned.conv_launch import weight_gradient

    shape = ConvShape.of(x.shape, weight.shape, stride, padding, dilation)
    return weight_gradient(grad, x, shape, KernelConfig(*config), has_bias)


@conv_weight_gradient.register_fake
def _weight_gradient_without_data(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    has_bias: bool,
    config: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    del stride, padding, dilation, config
    dw = x.new_empty(weight.shape).contiguous(memory_format=CHANNELS_LAST[x.dim()])
    return dw, grad.new_empty(weight.shape[0] if has_bias else 0)


def numbers(config: KernelConfig) -> list[int]:
    """A configuration as the operators take it."""
    return list(dataclasses.astuple(config))
