"""Convolution of one shard, by the fastest kernel that this device has for its shape.

Two things matter on CPUs, both shown by benchmarks/conv_kernels.py. oneDNN is faster on channels-last tensors. And ATen
leaves oneDNN for a kernel several times slower when a single sample has N·C·D·H ≤ 20480, which cutting a volume crosses
on the way down; oneDNN is then called by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_LARGEST_FOR_NATIVE = 20480  # ATen's threshold in use_mkldnn
_MANY_CHANNELS, _LARGE = 32, 1 << 17  # channels and elements of a sample from which blocks beat ATen's copy


@dataclass(frozen=True, slots=True)
class ConvParams:
    """The arguments of one local convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, params: ConvParams) -> torch.Tensor:
    """The local convolution; the result may be channels-last where that is faster."""
    x, weight = in_best_format(x, weight), in_best_format(weight, weight)
    if _needs_naming(x, weight, params):
        args = (params.padding, params.stride, params.dilation, params.groups)
        y: torch.Tensor = torch.ops.aten.mkldnn_convolution(x, weight, bias, *args)
    else:
        y = torch.ops.aten.convolution(x, weight, bias, *_aten_args(params))
    return y


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, params: ConvParams, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of input and weight, as far as `wanted`."""
    x, grad, weight = (in_best_format(t, weight) for t in (x, grad, weight))
    mask = [*wanted, False]
    if _needs_naming(x, weight, params):
        packed = torch.ops.aten.convolution_backward(
            grad.to_mkldnn(), x.to_mkldnn(), weight, None, *_aten_args(params), mask
        )
        dx, dw = (t.to_dense() if t is not None and t.is_mkldnn else t for t in packed[:2])
    else:
        dx, dw, _ = torch.ops.aten.convolution_backward(grad, x, weight, None, *_aten_args(params), mask)
    return dx if wanted[0] else None, dw if wanted[1] else None


def _aten_args(params: ConvParams) -> tuple[object, ...]:
    stride, padding, dilation = list(params.stride), list(params.padding), list(params.dilation)
    return stride, padding, dilation, False, [0] * len(stride), params.groups


def best_format(dtype: torch.dtype, device: torch.device, dims: int, kernel: Sequence[int]) -> torch.memory_format:
    """Channels-last in oneDNN for kernels with more than one tap; pointwise ones are matrix products either way."""
    best = _CHANNELS_LAST.get(dims)
    return best if best and math.prod(kernel) > 1 and _is_onednn(dtype, device) else torch.contiguous_format


def _is_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype == torch.float32 and bool(torch.backends.mkldnn.enabled)


def in_best_format(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The tensor as the kernel for `weight` wants it; as it is where no format is better."""
    best = best_format(tensor.dtype, tensor.device, tensor.dim(), weight.shape[2:])
    if best == torch.contiguous_format or tensor.is_contiguous(memory_format=best):
        return tensor
    if tensor.is_contiguous() and tensor.shape[1] >= _MANY_CHANNELS and tensor.numel() >= _LARGE * tensor.shape[0]:
        return _transposed(tensor, best)
    return tensor.contiguous(memory_format=best)


def _transposed(tensor: torch.Tensor, best: torch.memory_format) -> torch.Tensor:
    """The same tensor channels-last; ATen copies a transposed matrix in blocks, but a permuted tensor one by one."""
    out = torch.empty_like(tensor, memory_format=best)
    channels = tensor.shape[1]
    for source, target in zip(tensor, out, strict=True):
        target.movedim(0, -1).view(-1, channels).copy_(source.reshape(channels, -1).t())
    return out


def _needs_naming(x: torch.Tensor, weight: torch.Tensor, params: ConvParams) -> bool:
    """Whether ATen would not choose oneDNN by itself although oneDNN is faster."""
    if not _is_onednn(x.dtype, x.device) or x.dim() != 5 or x.shape[0] != 1 or params.groups > 1 or not x.numel():
        return False
    if math.prod(weight.shape[2:]) == 1 and x.is_contiguous():
        return False
    return math.prod(x.shape[:4]) <= _LARGEST_FOR_NATIVE and min(weight.shape[-2:]) <= 3
