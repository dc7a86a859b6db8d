"""Split transposed convolution, 1D to 3D."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from convmesh.dist import weights_over
from convmesh.errors import UnsupportedError
from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.local_conv_transpose import conv_transpose as conv_transpose_here
from convmesh.layout import Box
from convmesh.layout.maps import DimMap, Same, Transposed, Whole, excess
from convmesh.ops.channels.channel_layers import cut_conv_transpose, is_cut
from convmesh.ops.convolution.conv import check_operands
from convmesh.ops.core.autocast import autocast_inputs
from convmesh.ops.core.empty_result import empty_result
from convmesh.ops.core.exchange_plans import output_layout
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.padding import pad_dim
from convmesh.ops.core.per_dim import Ints, spread
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded


@implements(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, takes_cut_weights=True)
def conv_transpose(
    input: Sharded,  # noqa: A002 - torch's name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Sharded:
    """Transposed convolution of a sharded input with a replicated weight."""
    check_operands(input, weight, bias, groups, transposed=True)
    steps = _transposed(weight.shape[2:], stride, padding, output_padding, dilation)
    if is_cut(weight):
        return cut_conv_transpose(input, weight, bias, steps, groups)
    x, weight, bias = autocast_inputs(input.with_whole([1]), weight, bias)
    maps: tuple[DimMap, ...] = (Same(), Whole(weight.shape[1] * groups), *steps)
    work = output_layout(x.layout, maps)
    fetched = fetch(x, work, maps)
    weight_here, bias_here = weights_over(x.mesh, work.axes, weight, bias)
    assert weight_here is not None
    out = work.box(x.mesh.rank)
    if fetched.numel():
        crop = excess(steps, Box(out.spans[2:]), x.shape[2:])
        y = _local(fetched, weight_here, bias_here, steps, groups, crop, x.device_kind)
    else:  # an empty box, or one that no input writes to
        y = _with_bias(empty_result(fetched, out.shape, weight_here), bias_here)
    return Sharded(y, work, x.mesh)


def _local(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    steps: tuple[Transposed, ...],
    groups: int,
    excess: list[tuple[int, int]],
    kind: str,
) -> torch.Tensor:
    """Everything that the fetched inputs write, cropped (or zero-padded) to the rank's output box."""
    crop = tuple(max(0, min(low, high)) for low, high in excess)
    params = ConvParams(tuple(s.stride for s in steps), crop, tuple(s.dilation for s in steps), groups)
    filled = any(min(low, high) < 0 for low, high in excess)  # with zeros, which still need the bias
    y = conv_transpose_here(x, weight, None if filled else bias, params, kind)
    for dim, ((low, high), both) in enumerate(zip(excess, crop, strict=True), start=2):
        y = pad_dim(y, dim, both - low, both - high)
    return _with_bias(y, bias) if filled else y


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias.view(-1, *[1] * (y.dim() - 2))


def _transposed(
    kernel: torch.Size, stride: Ints, padding: Ints, output_padding: Ints, dilation: Ints
) -> tuple[Transposed, ...]:
    dims = len(kernel)
    strides, dilations = spread("stride", stride, dims), spread("dilation", dilation, dims)
    pads, extras = spread("padding", padding, dims, 0), spread("output_padding", output_padding, dims, 0)
    for extra, s, d in zip(extras, strides, dilations, strict=True):
        if extra >= max(s, d):
            raise UnsupportedError(
                f"`output_padding` (={extra}) must be smaller than stride (={s}) or dilation (={d})."
            )
    return tuple(Transposed(*args) for args in zip(kernel, strides, dilations, pads, extras, strict=True))
