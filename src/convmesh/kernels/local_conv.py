"""Convolution of one shard, by the fastest kernel that this device has for its shape.

Two things matter on CPUs, both shown by benchmarks/conv_kernels.py. oneDNN is faster on channels-last tensors, if they
outweigh the weight, which is reordered in every call. And for a single sample with N·C·D·H ≤ 20480, which a cut volume
soon reaches, ATen prefers a kernel several times slower than oneDNN; oneDNN is then called by name. That operator has
no backward, but both gradients can be computed by calls that reach oneDNN: the input's as a convolution with the
mirrored kernel, the weight's as a convolution of planes for each tap in depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.memory_format import CHANNELS_LAST, is_channels_last
from convmesh.kernels.pointwise_conv import pointwise, pointwise_backward
from convmesh.kernels.slab_conv import (
    convolution_in_slabs,
    input_gradient_in_slabs,
    may_need_slabs,
    slab_conv,
    weight_gradient_in_slabs,
)

_VECTOR = 8  # numbers of four bytes in a vector of AVX2
_LARGEST_FOR_NATIVE = 20480  # ATen's threshold in use_mkldnn
_OUTWEIGHS = 32  # input elements per weight element from which on work on the weight does not matter
_MANY_CHANNELS, _LARGE = 32, 1 << 17  # channels and elements of a sample above which blocks beat ATen's copy


_meta = torch.library.Library("aten", "IMPL", "Meta")


def _onednn_meta(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args: Any) -> torch.Tensor:
    """Meta kernel of oneDNN's convolution, which torch lacks: a dry run calls the same operators as a run."""
    padding, stride, dilation, groups = args
    rest = (stride, padding, dilation, False, [0] * len(stride), groups)
    return cast(torch.Tensor, torch.ops.aten.convolution(x, weight, bias, *rest))


_meta.impl("mkldnn_convolution", _onednn_meta)


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, params: ConvParams, kind: str
) -> torch.Tensor:
    """The local convolution by the kernels of a `kind` of device; its result may be channels-last if that is faster."""
    if _is_product(x, weight, params, kind):
        return pointwise(x, weight, bias)
    slabs = slab_conv(x.shape, weight.shape, params, kind)
    if slabs is not None:
        return convolution_in_slabs(x, weight, bias, slabs)
    if not suits_channels_last(x, weight):
        x = in_format_for(x, x, weight, kind)
        return cast(torch.Tensor, torch.ops.aten.convolution(x, weight, bias, *params.of_aten))
    x, weight = in_best_format(x, weight, kind), in_best_format(weight, weight, kind)
    if _needs_explicit_onednn(x, weight, params, kind):
        args = (params.padding, params.stride, params.dilation, params.groups)
        y: torch.Tensor = torch.ops.aten.mkldnn_convolution(x, weight, bias, *args)
    else:
        y = torch.ops.aten.convolution(x, weight, bias, *params.of_aten)
    return in_best_format(y, weight, kind)  # for one channel ATen sees a contiguous input


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, params: ConvParams, wanted: tuple[bool, bool], kind: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of input and weight; None for those not `wanted`."""
    if _is_product(x, weight, params, kind):
        return pointwise_backward(grad, x, weight, wanted)
    slabs = slab_conv(x.shape, weight.shape, params, kind)
    if slabs is not None:
        dx = input_gradient_in_slabs(grad, weight, slabs) if wanted[0] else None
        return dx, weight_gradient_in_slabs(grad, x, weight, slabs) if wanted[1] else None
    if suits_channels_last(x, weight):
        x, grad, weight = (in_best_format(t, weight, kind) for t in (x, grad, weight))
    else:
        grad, x = in_format_for(grad, x, weight, kind), in_format_for(x, x, weight, kind)
    if _needs_explicit_onednn(x, weight, params, kind):
        dx = _onednn_input_gradient(grad, x, weight, params, kind) if wanted[0] else None
        return dx, _weight_gradient_by_planes(grad, x, weight, params) if wanted[1] else None
    if not x.is_contiguous() and may_break_onednn(x, weight, max(params.stride), kind):
        # A one-tap kernel is contiguous in either format; its strides decide which one oneDNN takes.
        grad, x, weight = grad.contiguous(), x.contiguous(), weight.flatten().view(weight.shape)
    dx, dw = _aten_gradients(grad, x, weight, params, wanted)
    return dx if wanted[0] else None, dw if wanted[1] else None


def may_break_onednn(x: torch.Tensor, weight: torch.Tensor, stride: int, kind: str) -> bool:
    """Whether oneDNN's gradient of this weight may write past its memory, and crash the process sooner or later.

    It does so for one tap with a stride and fewer channels than a vector of AVX2 holds, channels-last: seen on an EPYC
    without AVX-512, with torch 2.11, 2.13 and 2.15.
    """
    is_strided_tap = stride > 1 and math.prod(weight.shape[2:]) == 1
    return is_strided_tap and weight.shape[1] < _VECTOR and _is_onednn(x.dtype, kind)


def _aten_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, params: ConvParams, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dw, _ = torch.ops.aten.convolution_backward(grad, x, weight, None, *params.of_aten, [*wanted, False])
    return dx, dw


def _onednn_input_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, params: ConvParams, kind: str
) -> torch.Tensor:
    reaches = [d * (k - 1) for d, k in zip(params.dilation, weight.shape[2:], strict=True)]
    padding = tuple(reach - p for reach, p in zip(reaches, params.padding, strict=True))
    if max(params.stride) == 1 and min(padding) >= 0:
        mirrored = weight.flip(*range(2, weight.dim())).transpose(0, 1)
        return convolution(grad, mirrored, None, ConvParams(params.stride, padding, params.dilation, 1), kind)
    # Tensors in oneDNN's own format reach it at any size, at the cost of copies.
    if x.is_meta:
        return _aten_gradients(grad, x, weight, params, (True, False))[0]
    packed = torch.ops.aten.convolution_backward(
        grad.to_mkldnn(), x.to_mkldnn(), weight, None, *params.of_aten, [True, False, False]
    )
    dx: torch.Tensor = packed[0].to_dense()
    return dx


def _weight_gradient_by_planes(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, params: ConvParams
) -> torch.Tensor:
    """For each tap in depth, the gradient of a 2D convolution whose samples are the planes that the tap joins."""
    planes, grad_planes = x[0].movedim(1, 0), grad[0].movedim(1, 0)  # channels-last planes: views, no copies
    stride, padding, dilation = params.stride[0], params.padding[0], params.dilation[0]
    plane_args = ConvParams(params.stride[1:], params.padding[1:], params.dilation[1:], 1).of_aten
    dw = torch.zeros_like(weight)
    for tap in range(weight.shape[2]):
        shift = tap * dilation - padding
        first = max(0, -(shift // stride))  # the first output plane whose input plane is not padding
        last = min(len(grad_planes), (len(planes) - 1 - shift) // stride + 1)
        if first < last:
            read = planes[first * stride + shift : (last - 1) * stride + shift + 1 : stride]
            args = (grad_planes[first:last], read, weight[:, :, tap], None, *plane_args, [False, True, False])
            dw[:, :, tap] = torch.ops.aten.convolution_backward(*args)[1]
    return dw


def best_format(dtype: torch.dtype, kind: str, dims: int, kernel: Sequence[int]) -> torch.memory_format:
    """Channels-last for oneDNN kernels with more than one tap; pointwise ones are matrix products in any format."""
    best = CHANNELS_LAST.get(dims)
    return best if best and math.prod(kernel) > 1 and _is_onednn(dtype, kind) else torch.contiguous_format


def outweighs(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether work on the input is so large that copies of the weight do not matter."""
    return x.numel() >= _OUTWEIGHS * weight.numel()


def suits_channels_last(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether an input should be channels-last for a weight, which is then copied unless it is channels-last too.

    A single volume should, for its kernels; so should an input that already is, unless it is lighter than a weight
    to be copied; any other only if it outweighs the copies of both.
    """
    if not is_always_left_alone(x):
        return True
    if is_channels_last(x):
        return x.numel() >= weight.numel() or is_channels_last(weight)
    return outweighs(x, weight)


def in_format_for(tensor: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """`tensor`, an input `x` or a gradient of its output, in the format that suits both input and weight.

    A light channels-last one becomes plain: otherwise ATen would copy the weight in every call.
    """
    if suits_channels_last(x, weight):
        return in_best_format(tensor, weight, kind)
    is_copied_for = is_channels_last(tensor) and math.prod(weight.shape[2:]) > 1 and _is_onednn(tensor.dtype, kind)
    return tensor.contiguous() if is_copied_for else tensor


def is_best_left_alone(x: torch.Tensor, weight: torch.Tensor, params: ConvParams, kind: str) -> bool:
    """Whether to leave whole samples to torch, in their own format: channels-last pays only if all layers of a network
    use it, and reordering weights costs more than it saves on small inputs."""
    if slab_conv(x.shape, weight.shape, params, kind) is not None:
        return False
    may_break = may_break_onednn(x, weight, max(params.stride), kind)
    return not may_break and not _needs_explicit_onednn(x, weight, params, kind)


def is_any_best_left_alone(x: torch.Tensor, weight: torch.Tensor, stride: int, kind: str) -> bool:
    """Whether that holds for a convolution of which the largest stride is known, but not padding and dilation."""
    may_be_cut = may_need_slabs(x, weight, kind) or may_break_onednn(x, weight, stride, kind)
    return is_always_left_alone(x) and not may_be_cut


def is_always_left_alone(x: torch.Tensor) -> bool:
    """Whether that holds for any kernel: only for single volumes must oneDNN be called by name."""
    return x.dim() != 5 or x.shape[0] != 1


def _is_onednn(dtype: torch.dtype, kind: str) -> bool:
    return kind == "cpu" and dtype == torch.float32 and bool(torch.backends.mkldnn.enabled)


def in_best_format(tensor: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The tensor in the best format for the kernel with `weight`; unchanged if no format is better."""
    best = best_format(tensor.dtype, kind, tensor.dim(), weight.shape[2:])
    if best == torch.contiguous_format or tensor.is_contiguous(memory_format=best):
        return tensor
    if tensor.is_contiguous() and tensor.shape[1] >= _MANY_CHANNELS and tensor.numel() >= _LARGE * tensor.shape[0]:
        return _transposed(tensor, best)
    return tensor.contiguous(memory_format=best)


def _transposed(tensor: torch.Tensor, best: torch.memory_format) -> torch.Tensor:
    """The tensor as channels-last; ATen copies a transposed matrix in blocks, a permuted tensor element by element."""
    out = torch.empty_like(tensor, memory_format=best)
    channels = tensor.shape[1]
    for source, target in zip(tensor, out, strict=True):
        target.movedim(0, -1).view(-1, channels).copy_(source.reshape(channels, -1).t())
    return out


def _is_product(x: torch.Tensor, weight: torch.Tensor, params: ConvParams, kind: str) -> bool:
    """Whether the convolution is a matrix product, for which BLAS is as good as any kernel in either format."""
    one_tap = math.prod(weight.shape[2:]) == 1 and params.groups == 1
    plain = max(params.stride) == 1 and max(params.padding) == 0
    return one_tap and plain and kind == "cpu" and x.dtype in (torch.float32, torch.float64)


def _needs_explicit_onednn(x: torch.Tensor, weight: torch.Tensor, params: ConvParams, kind: str) -> bool:
    """Whether oneDNN is faster, but ATen would not choose it."""
    if not _is_onednn(x.dtype, kind) or is_always_left_alone(x) or params.groups > 1 or not x.numel():
        return False
    if math.prod(x.shape[:4]) > _LARGEST_FOR_NATIVE or min(weight.shape[-2:]) > 3:
        return False
    # oneDNN 3.12 crashes on some kernels wider than a plane; these are cheap anyway.
    reaches = (d * (k - 1) + 1 for d, k in zip(params.dilation, weight.shape[2:], strict=True))
    each = zip(reaches, (math.inf, *x.shape[3:]), params.padding, strict=True)
    return all(reach <= extent and padding < reach for reach, extent, padding in each)
