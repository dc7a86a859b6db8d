"""Calls the kernels for groups of outputs: channels-last in, channels-last out."""

from __future__ import annotations

from math import prod

import torch
import triton

from convmesh.kernels.tuned import group_kernels
from convmesh.kernels.tuned.conv_configs import KernelConfig
from convmesh.kernels.tuned.conv_operands import channels_last, output_like, precision
from convmesh.kernels.tuned.conv_shape import ConvShape

ROWS_OF_WEIGHTS = 32
"""Rows of a banded matrix that one program writes."""


def convolve_groups(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: ConvShape, config: KernelConfig,
    turned: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The convolution of `shape`; `turned` if the weight is the mirrored convolution's."""
    x, y = channels_last(x), output_like(x, shape)
    group, window = config.group, shape.window_of(config.group)
    run = window[2] * shape.channels
    banded = _banded(channels_last(weight), shape, config, turned)
    deep, high, wide = (triton.cdiv(out, size) for out, size in zip(shape.out, group, strict=True))
    down, across = triton.cdiv(high, config.rows), triton.cdiv(wide, config.columns)
    group_kernels.grouped_forward[(shape.samples * deep * down * across,)](
        x, banded, x if bias is None else bias, y, *shape.extents, *shape.out, deep, down, across,
        shape.channels, shape.filters, *shape.stride, *shape.padding, *group, *window[:2], run,
        config.rows, config.columns, config.filters, config.taps, bias is not None, precision(x),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return y


def _banded(weight: torch.Tensor, shape: ConvShape, config: KernelConfig, turned: bool) -> torch.Tensor:
    """The matrix that windows of groups are multiplied by, with lines padded to whole blocks."""
    window = shape.window_of(config.group)
    run = window[2] * shape.channels
    padded = triton.cdiv(run, config.taps) * config.taps
    rows, block = prod(window[:2]) * padded, min(ROWS_OF_WEIGHTS, config.taps)
    banded = torch.empty((rows, config.filters), dtype=weight.dtype, device=weight.device)
    group_kernels.banded_weights[(rows // block,)](
        weight, banded, shape.channels, shape.filters, *shape.kernel, *shape.stride, *shape.dilation, *config.group,
        window[1], run, padded, config.filters, block, turned,
    )  # fmt: skip
    return banded
