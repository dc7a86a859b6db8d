"""Transposed convolution of one shard, by the fastest kernel that this device has for its shape.

If the kernel is as wide as the stride, each input writes its own block and the layer is one matrix product. ATen's
kernel for it is several times slower on small shards, and its contiguous results force copies on the channels-last
layers around it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.local_conv import best_format
from convmesh.kernels.slab_conv import (
    SlabConv,
    convolution_in_slabs,
    input_gradient_in_slabs,
    slab_conv,
    weight_gradient_in_slabs,
)
from convmesh.layout.maps import Transposed


def conv_transpose(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, params: ConvParams, kind: str
) -> torch.Tensor:
    """The local transposed convolution on a `kind` of device, cropped by `params.padding` at both ends."""
    if _writes_blocks(x, weight, params, kind):
        return _blocks(x, weight, bias)
    slabs = slab_conv(_written(x, weight, params), weight.shape, params, kind)
    if slabs is not None:
        y: torch.Tensor = _InSlabs.apply(x, weight, bias, slabs)
        return y
    none = [0] * len(params.stride)
    strides = (params.stride, params.padding, params.dilation)
    return torch.convolution(x, weight, bias, *strides, True, none, params.groups)


def _written(x: torch.Tensor, weight: torch.Tensor, params: ConvParams) -> tuple[int, ...]:
    """The output's shape."""
    each = zip(weight.shape[2:], params.stride, params.dilation, params.padding, strict=True)
    space = (Transposed(*dim).out_extent(extent) for dim, extent in zip(each, x.shape[2:], strict=True))
    return (x.shape[0], weight.shape[1] * params.groups, *space)


class _InSlabs(torch.autograd.Function):
    """The adjoint of a convolution in slabs; its gradients are that convolution itself and its weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slabs: SlabConv
    ) -> torch.Tensor:
        ctx.slabs = slabs
        ctx.save_for_backward(x, weight)
        y = input_gradient_in_slabs(x, weight, slabs)
        return y if bias is None else y.add_(bias.view(-1, *[1] * (y.dim() - 2)))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        dx = convolution_in_slabs(dy, weight, None, ctx.slabs) if wants_x else None
        dw = weight_gradient_in_slabs(x, dy, weight, ctx.slabs) if wants_w else None
        return dx, dw, dy.sum([0, *range(2, dy.dim())]) if wants_b else None, None


def _writes_blocks(x: torch.Tensor, weight: torch.Tensor, params: ConvParams, kind: str) -> bool:
    """Whether blocks neither overlap nor leave gaps, on a device whose other kernels take channels-last."""
    apart = tuple(weight.shape[2:]) == params.stride and max(params.dilation) == 1 and params.groups == 1
    last = best_format(x.dtype, kind, x.dim(), weight.shape[2:]) != torch.contiguous_format
    return apart and last and max(params.padding) == 0


def _blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    kernel, dims = weight.shape[2:], x.dim() - 2
    matrix = weight.movedim(1, -1).flatten(1).t()
    shift = None if bias is None else bias.repeat(kernel.numel())
    written = F.linear(x.movedim(1, -1), matrix, shift)
    samples, *space, _ = written.shape
    # N×D×H×W×(d×h×w×F) to N×(D×d)×(H×h)×(W×w)×F: a block's rows go between those of its neighbours.
    order = [0, *(axis for dim in range(dims) for axis in (1 + dim, 1 + dims + dim)), 1 + 2 * dims]
    apart = written.view(samples, *space, *kernel, -1).permute(order)
    return apart.reshape(samples, *(n * k for n, k in zip(space, kernel, strict=True)), -1).movedim(-1, 1)
