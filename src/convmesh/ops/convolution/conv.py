"""Split convolution, 1D to 3D."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.dist import weights_over
from convmesh.errors import UnsupportedError
from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.fusing import is_fused
from convmesh.kernels.local_conv import is_any_best_left_alone, is_best_left_alone, outweighs
from convmesh.layout import Box, Layout
from convmesh.layout.borders import check_padding
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.layout.maps import DimMap, Same, Whole, Window
from convmesh.layout.terms import Terms, split_terms
from convmesh.ops.channels.channel_layers import cut_conv, is_cut
from convmesh.ops.convolution.conv_function import SplitConv, SplitConvFunction, split_conv
from convmesh.ops.core.autocast import autocast_inputs, is_cast, without_autocast
from convmesh.ops.core.by_samples import by_samples, learns_partly
from convmesh.ops.core.empty_result import empty_result
from convmesh.ops.core.exchange_plans import Maps, halo, output_layout
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.padding import extend
from convmesh.ops.core.per_dim import Ints, spread
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded

BYTES_WORTH_OVERLAP = 8 << 20
"""The smallest halo that a compiled step on a GPU hides behind computation. An estimate: two separate terms take about
ten kernels more, 100 to 300 µs, in which 50 GB/s carry 5 to 15 MB."""


def _is_left_to_torch(
    x: Sharded, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Ints = 1, *options: Any, **others: Any
) -> bool:
    """Whether torch's own convolution is best for whole samples, regardless of its other options."""
    del options, others
    if weight.dim() != len(x.layout.cuts) or is_cast(x.local):
        return False
    largest_stride = stride if isinstance(stride, int) else max(stride)
    is_alone = is_any_best_left_alone(x.local, weight, largest_stride, x.device_kind)
    return is_alone and learns_partly(x, weight, bias)


by_samples(F.conv1d, F.conv2d, F.conv3d, when=_is_left_to_torch)


@implements(F.conv1d, F.conv2d, F.conv3d, takes_cut_weights=True)
def conv(
    input: Sharded,  # noqa: A002 - torch's name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Sharded:
    """Convolution of a sharded input with a replicated weight. `padding_mode` as in `torch.nn.Conv3d`."""
    check_operands(input, weight, bias, groups)
    windows = _windows(input.shape[2:], weight.shape[2:], stride, padding, dilation, padding_mode)
    if is_cut(weight):
        return cut_conv(input, weight, bias, windows, groups)
    x, weight, bias = autocast_inputs(input.with_whole([1]), weight, bias)
    run = _overlapped if padding_mode == "zeros" else _folded
    return run(x, weight, bias, windows, groups)


def _overlapped(
    x: Sharded, weight: torch.Tensor, bias: torch.Tensor | None, windows: tuple[Window, ...], groups: int
) -> Sharded:
    maps: Maps = (Same(), Whole(weight.shape[0]), *windows)
    work = output_layout(x.layout, maps)
    split = _split(x.layout, work, maps, groups, x.mesh.rank, _overlaps(x, weight, work, maps), x.device_kind)
    if split.plain is not None and is_best_left_alone(x.local, weight, split.plain, x.device_kind):
        return Sharded(_alone(x, weight, bias, split.plain, work), work, x.mesh)
    with without_autocast(x.device):
        y = SplitConvFunction.apply(x.local, weight, bias, split, x.mesh, x.mesh.weight_axes(work.axes))
    return Sharded(y, work, x.mesh)


def _overlaps(x: Sharded, weight: torch.Tensor, work: Layout, maps: Maps) -> bool:
    """Whether work starts before halos arrive, at the cost of a few more kernels: as the settings say, else by size.

    On a CPU, halo terms need extra calls and copies of the weight, which cost more than the copy that joins a small
    input to its halos. A compiler joins them in a kernel that it makes anyway: waiting for a small halo then costs a
    GPU less than separate terms would.
    """
    if x.mesh.settings.overlap is not None:
        return x.mesh.settings.overlap
    if x.device_kind == "cpu":
        return outweighs(x.local, weight)
    if not is_fused():
        return True
    travels = halo(x.layout, work, maps, x.mesh.rank).forward.elements_received * x.local.element_size()
    return travels >= BYTES_WORTH_OVERLAP


def _alone(
    x: Sharded, weight: torch.Tensor, bias: torch.Tensor | None, params: ConvParams, work: Layout
) -> torch.Tensor:
    """Whole samples: torch's own convolution and backward, without our overhead."""
    weight_here, bias_here = weights_over(x.mesh, work.axes, weight, bias)
    assert weight_here is not None
    none = [0] * len(params.stride)
    return torch.convolution(
        x.local, weight_here, bias_here, params.stride, params.padding, params.dilation, False, none, params.groups
    )


@lru_cache(maxsize=LAYOUTS_KEPT)
def _split(source: Layout, work: Layout, maps: Maps, groups: int, rank: int, overlap: bool, kind: str) -> SplitConv:
    held, out = source.box(rank), work.box(rank)
    windows = tuple(m for m in maps if isinstance(m, Window))
    terms = Terms(None, ())
    if out.size:
        terms = split_terms(windows, Box(held.spans[2:]), Box(out.spans[2:]), source.shape[2:], overlap)
    stride, dilation = tuple(w.stride for w in windows), tuple(w.dilation for w in windows)
    return split_conv(halo(source, work, maps, rank), terms, out, stride, dilation, groups, kind)


def _folded(
    x: Sharded, weight: torch.Tensor, bias: torch.Tensor | None, windows: tuple[Window, ...], groups: int
) -> Sharded:
    """Borders that repeat the input (circular, reflect, replicate): fetch, add the border, convolve."""
    maps: tuple[DimMap, ...] = (Same(), Whole(weight.shape[0]), *windows)
    work = output_layout(x.layout, maps)
    local = fetch(x, work, maps)
    out = work.box(x.mesh.rank)
    weight_here, bias_here = weights_over(x.mesh, work.axes, weight, bias)
    assert weight_here is not None
    if not out.size:
        return Sharded(empty_result(local, out.shape, weight_here, bias_here), work, x.mesh)
    for dim, window in enumerate(windows, start=2):
        local = extend(local, dim, window.extended(out.spans[dim]), x.shape[dim], window.mode)
    strides, dilations = [w.stride for w in windows], [w.dilation for w in windows]
    none = [0] * len(windows)
    y = torch.convolution(local, weight_here, bias_here, strides, none, dilations, False, none, groups)
    return Sharded(y, work, x.mesh)


def check_operands(
    x: Any, weight: torch.Tensor, bias: torch.Tensor | None, groups: int, transposed: bool = False
) -> None:
    """Refuse what torch would refuse, before anything is sent."""
    if isinstance(weight, Sharded) or isinstance(bias, Sharded):
        raise UnsupportedError(
            "`weight` and `bias` of a split convolution must be the model's, or computed from them alone; these depend "
            "on the input. Write it with F.unfold and torch.einsum, which take any tensors."
        )
    if not isinstance(x, Sharded):
        raise UnsupportedError("a split convolution takes a Sharded input and plain (replicated) `weight` and `bias`.")
    if bias is not None and is_cut(bias) and not is_cut(weight):
        raise UnsupportedError("`bias` is a DTensor but `weight` is not; cut both, or pass `bias.full_tensor()`.")
    spatial = weight.dim() - 2
    if x.dim() != weight.dim():
        raise UnsupportedError(
            f"`input` (shape {tuple(x.shape)}) must have a sample dim, a channel dim and {spatial} spatial dims for a "
            f"`weight` of shape {tuple(weight.shape)}; add the sample dim before you shard a single sample."
        )
    filters = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and tuple(bias.shape) != (filters,):
        raise UnsupportedError(f"`bias` (shape {tuple(bias.shape)}) must have one value for each of {filters} filters.")
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.shape[1] != channels:
        raise UnsupportedError(
            f"`input` has {x.shape[1]} channels, but `weight` of shape {tuple(weight.shape)} with groups={groups} "
            f"takes {channels}."
        )


def _windows(
    extents: Sequence[int], kernel: Sequence[int], stride: Ints, padding: Ints | str, dilation: Ints, mode: str
) -> tuple[Window, ...]:
    """The windows of a layer's spatial dims; cached, since modules pass the same tuples on every call."""
    options = stride, padding, dilation
    if any(isinstance(value, list) for value in options):
        return _cached_windows.__wrapped__(extents, kernel, *options, mode)
    return _cached_windows(extents, kernel, *options, mode)


@cache
def _cached_windows(
    extents: Sequence[int], kernel: Sequence[int], stride: Ints, padding: Ints | str, dilation: Ints, mode: str
) -> tuple[Window, ...]:
    dims = len(extents)
    strides, dilations = spread("stride", stride, dims), spread("dilation", dilation, dims)
    pads = _pads(padding, kernel, strides, dilations)
    windows = []
    for n, k, s, d, (low, high) in zip(extents, kernel, strides, dilations, pads, strict=True):
        window = Window(k, s, d, low, high, check_padding(mode, (low, high), n))
        if window.reach > n + low + high:
            raise UnsupportedError(
                f"`weight`: the kernel spans {window.reach} indices, but the padded input has {n + low + high}; use a "
                "larger input or more padding."
            )
        windows.append(window)
    return tuple(windows)


def _pads(
    padding: Ints | str, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[tuple[int, int]]:
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        if any(s != 1 for s in strides):
            raise UnsupportedError(
                f"`padding` (='same') needs stride 1, not {tuple(strides)}; give the padding as numbers."
            )
        totals = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):
        raise UnsupportedError(f"`padding` (={padding!r}) must be whole numbers, 'same' or 'valid'.")
    return [(p, p) for p in spread("padding", padding, len(kernel), smallest=0)]
