"""Calls the kernels on whole tensors: channels-last in, channels-last out."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import triton

from convmesh.kernels.tuned import conv_kernels
from convmesh.kernels.tuned.conv_configs import KernelConfig
from convmesh.kernels.tuned.conv_operands import channels_last, output_like, precision
from convmesh.kernels.tuned.conv_shape import ConvShape
from convmesh.kernels.tuned.group_launch import convolve_groups


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: ConvShape, config: KernelConfig
) -> torch.Tensor:
    """The convolution of `shape`."""
    if config.is_grouped:
        return convolve_groups(x, weight, bias, shape, config)
    x, weight, y = channels_last(x), channels_last(weight), output_like(x, shape)
    tiling = Tiling.of(shape, config)
    grid = (tiling.units * tiling.across, triton.cdiv(shape.filters, config.filters))
    conv_kernels.forward[grid](
        x, weight, x if bias is None else bias, y, *shape.extents, *shape.out, tiling.strips, tiling.down,
        tiling.across, *_constants(shape), *_blocks(shape, config), bias is not None, precision(x),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return y


def input_gradient(grad: torch.Tensor, weight: torch.Tensor, shape: ConvShape, config: KernelConfig) -> torch.Tensor:
    """The gradient of the input of `shape`, by the mirrored convolution."""
    mirror = shape.mirrored()
    assert mirror is not None
    if config.is_grouped:
        return convolve_groups(grad, weight, None, mirror, config, turned=True)
    turned = weight.flip(*range(2, weight.dim())).transpose(0, 1)
    return convolve(grad, turned, None, mirror, config)


def weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, shape: ConvShape, config: KernelConfig, has_bias: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of weight and bias (empty without one)."""
    if not config.swapped:
        return _weight_gradient(grad, x, shape, config, has_bias)
    mirror = shape.mirrored()
    assert mirror is not None
    turned, _ = _weight_gradient(x, grad, mirror, config, has_bias=False)
    space = tuple(range(2, x.dim()))
    dw = channels_last(turned.flip(space).transpose(0, 1))
    return dw, grad.sum((0, *space)) if has_bias else grad.new_empty(0)


def _weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, shape: ConvShape, config: KernelConfig, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Programs sum some outputs each, then their parts are added."""
    grad, x = channels_last(grad), channels_last(x)
    tiling = Tiling.of(shape, config)
    parts = min(triton.cdiv(config.parts, tiling.across), tiling.units) * tiling.across
    sums = torch.empty((parts, shape.filters, shape.taps), dtype=torch.float32, device=x.device)
    shifts = torch.empty((parts, shape.filters if has_bias else 0), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(prod(shape.kernel), config.taps), triton.cdiv(shape.filters, config.filters), parts)
    conv_kernels.weight_gradient[grid](
        x, grad, sums, shifts, tiling.units, *shape.extents, *shape.out, tiling.strips, tiling.down, tiling.across,
        *_constants(shape), *_blocks(shape, config), has_bias, precision(x),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    kernel = shape.kernel[3 - (x.dim() - 2) :]
    dw = sums.sum(0).to(x.dtype).view(shape.filters, *kernel, shape.channels).movedim(-1, 1)
    return dw, shifts.sum(0).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How outputs are cut: planes into strips, strips into tiles one below the other."""

    units: int
    """The strips of all planes, for each of the tiles `across`."""
    strips: int
    """The strips of one plane."""
    down: int
    across: int

    @staticmethod
    def of(shape: ConvShape, config: KernelConfig) -> Tiling:
        depth, height, width = shape.out
        down, across = triton.cdiv(height, config.rows), triton.cdiv(width, config.columns)
        strips = triton.cdiv(down, config.walk)
        return Tiling(shape.samples * depth * strips, strips, down, across)


def _constants(shape: ConvShape) -> tuple[int, ...]:
    return shape.channels, shape.filters, *shape.kernel, *shape.stride, *shape.padding, *shape.dilation


def _blocks(shape: ConvShape, config: KernelConfig) -> tuple[int, ...]:
    channels = triton.next_power_of_2(shape.channels)
    return config.rows, config.columns, config.filters, config.taps, channels, config.walk, config.flat
