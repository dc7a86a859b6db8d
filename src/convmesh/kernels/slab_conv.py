"""Convolutions of samples whose elements cannot be counted in 32 bits, slab by slab.

From 2^31 elements per sample on, the kernels that cuDNN chooses without a search are many times slower, and a search
takes minutes (benchmarks/slabs.py). The first dim of space is cut, as it would be over ranks, so that each slab is
counted in 32 bits. Slabs read the input in place: only windows that reach into padding, in separate thin slabs, read a
padded copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F

from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.memory_format import empty_like_format
from convmesh.layout.box import Span
from convmesh.layout.maps import Window
from convmesh.layout.slabs import InputSlab, OutputSlab, input_slabs, output_slabs

CLIFF = 1 << 31
"""The number of elements of a sample from which on 32 bits cannot count them."""

SLAB = 1 << 29
"""The most elements that a slab reads or writes: enough to occupy a GPU, and few compared with the sample."""

COUNTED = 1 << 32
"""No tensor has a dim this long: it stands for any extent in a dry run."""


class SlabConv(NamedTuple):
    """A convolution of one sample in slabs along the first dim of space."""

    params: ConvParams
    """The arguments for each slab, without padding in the dim that is cut."""
    given: tuple[int, ...]
    made: tuple[int, ...]
    """Channels and extents of a sample of the input, and of the output."""
    of_outputs: tuple[OutputSlab, ...]
    """The largest one first: its result decides the format of the whole."""
    of_inputs: tuple[InputSlab, ...]


def may_need_slabs(x: torch.Tensor, weight: torch.Tensor, kind: str) -> bool:
    """Whether a convolution may have to be cut into slabs, for some padding and stride."""
    channels = max(x.shape[1], weight.shape[0])
    return kind == "cuda" and channels * math.prod(x.shape[2:]) >= CLIFF // 2 and channels < COUNTED


def slab_conv(shape: Sequence[int], weight_shape: Sequence[int], params: ConvParams, kind: str) -> SlabConv | None:
    """The slabs of a convolution of an input of `shape`; None if it is best left whole."""
    has_samples = kind == "cuda" and shape[0] > 0
    return _slab_conv(tuple(shape[1:]), tuple(weight_shape), params) if has_samples else None


@lru_cache(maxsize=4096)
def _slab_conv(given: tuple[int, ...], weight_shape: tuple[int, ...], params: ConvParams) -> SlabConv | None:
    each = zip(weight_shape[2:], params.stride, params.dilation, params.padding, params.padding, strict=True)
    windows = [Window(*arguments) for arguments in each]
    outs = tuple(window.out_extent(extent) for window, extent in zip(windows, given[1:], strict=True))
    made = (weight_shape[0], *outs)
    largest = max(math.prod(given), math.prod(made))
    if largest < CLIFF or max(given[0], made[0]) >= COUNTED or not math.prod(made):
        return None
    row, row_made = math.prod(given) // given[1], math.prod(made) // made[1]
    most_outs = SLAB // max(row * params.stride[0], row_made)
    most_inputs = SLAB // max(row, row_made // params.stride[0])
    of_outputs = output_slabs(windows[0], given[1], max(1, most_outs))
    return SlabConv(
        replace(params, padding=(0, *params.padding[1:])),
        given,
        made,
        tuple(sorted(of_outputs, key=lambda slab: -slab.out.extent)),
        input_slabs(windows[0], given[1], max(1, most_inputs)),
    )


def convolution_in_slabs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: SlabConv
) -> torch.Tensor:
    """The convolution, sample by sample and slab by slab."""
    y = None
    for sample, slab in product(range(len(x)), how.of_outputs):
        source = _source(x, sample, slab)
        part = torch.ops.aten.convolution(source, weight, bias, *how.params.of_aten)
        if y is None:
            y = empty_like_format((len(x), *how.made), part)
        _part(y, sample, slab.out).copy_(part)
    assert y is not None  # an empty batch is not cut
    return y


def input_gradient_in_slabs(grad: torch.Tensor, weight: torch.Tensor, how: SlabConv) -> torch.Tensor:
    """The gradient of the input, in the format of the output's."""
    dx = empty_like_format((len(grad), *how.given), grad)
    for sample, slab in product(range(len(grad)), how.of_inputs):
        target = _part(dx, sample, slab.near)
        if slab.covered != slab.near:
            target.zero_()
        if slab.covered.extent:
            _part(dx, sample, slab.covered).copy_(_input_gradient(_part(grad, sample, slab.outs), weight, slab, how))
    return dx


def _input_gradient(grad: torch.Tensor, weight: torch.Tensor, slab: InputSlab, how: SlabConv) -> torch.Tensor:
    """The gradient of the slab's inputs that windows cover."""
    like = empty_like_format((1, how.given[0], slab.frame.extent, *how.given[2:]), grad)
    wanted = [True, False, False]
    dx = torch.ops.aten.convolution_backward(grad, like, weight, None, *how.params.of_aten, wanted)[0]
    return _part(dx, 0, slab.covered.shift(-slab.frame.start))


def weight_gradient_in_slabs(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, how: SlabConv) -> torch.Tensor:
    """The gradient of the weight: the sum of all slabs', in at least float32."""
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    total = torch.zeros_like(weight, dtype=torch.float32 if is_half else weight.dtype)
    for sample, slab in product(range(len(x)), how.of_outputs):
        near, source = _part(grad, sample, slab.out), _source(x, sample, slab)
        wanted = [False, True, False]
        total += torch.ops.aten.convolution_backward(near, source, weight, None, *how.params.of_aten, wanted)[1]
    return total.to(weight.dtype)


def _part(tensor: torch.Tensor, sample: int, span: Span) -> torch.Tensor:
    return tensor[sample : sample + 1, :, span.slice()]


def _source(x: torch.Tensor, sample: int, slab: OutputSlab) -> torch.Tensor:
    source = _part(x, sample, slab.source)
    if not slab.low and not slab.high:
        return source
    return F.pad(source, [0, 0] * (x.dim() - 3) + [slab.low, slab.high])
