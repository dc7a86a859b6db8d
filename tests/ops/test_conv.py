"""Convolution and transposed convolution against a single device."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from convmesh import Mesh
from convmesh.ops import Sharded, conv
from convmesh.testing import SplitCase
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.draws import draws
from tests.ops.grids import on_grids

Shape = tuple[int, ...]
Check = Callable[[SplitCase], None]
CONV: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MODULE: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def convolve(x: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel")  # torch's warning about its own copy
        return CONV[weight.dim() - 2](x, weight, bias, **options)


def convolve_transposed(x: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
    return CONV_TRANSPOSE[weight.dim() - 2](x, weight, bias, **options)


def convolve_module(x: Any, weight: Any, bias: Any, mode: str, padding: Any, stride: int, in_one: bool) -> Any:
    """The reference is torch's module; the split run is the module on shards, or `ops.conv`, which pads `in_one`."""
    if in_one and isinstance(x, Sharded):
        return conv(x, weight, bias, stride, padding, padding_mode=mode)
    return _module(x, weight, bias, mode, padding, stride)


def _module(x: Any, weight: Any, bias: Any, mode: str, padding: Any, stride: int) -> Any:
    spatial = weight.dim() - 2
    module = MODULE[spatial](
        weight.shape[1], weight.shape[0], tuple(weight.shape[2:]), stride, padding, padding_mode=mode
    )
    names = {"weight": weight, "bias": bias}
    return torch.func.functional_call(module.to(weight.dtype), names, (x,))


def per_dim(data: st.DataObject, dims: int, smallest: int, largest: int) -> tuple[int, ...]:
    return tuple(data.draw(st.integers(smallest, largest)) for _ in range(dims))


def draw_geometry(
    data: st.DataObject, mesh: Mesh
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]], tuple[int, ...]]:
    """An input shape (channels open), options and a kernel that fits it."""
    spatial = data.draw(spatial_dims(mesh))
    kernel = per_dim(data, spatial, 1, 5)
    dilation = per_dim(data, spatial, 1, 2)
    padding = per_dim(data, spatial, 0, 4)
    fits = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    space = tuple(max(n, fit) for n, fit in zip(data.draw(extents(spatial)), fits, strict=True))
    options = {"stride": per_dim(data, spatial, 1, 3), "padding": padding, "dilation": dilation}
    return (data.draw(batch_sizes(mesh)), *space), options, kernel


@on_grids
@draws(25)
@given(data=st.data())
@pytest.mark.operator("convolution", "any kernel, stride, dilation, padding; groups and depthwise; bias")
def test_convolution(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    (n, *space), options, kernel = draw_geometry(data, mesh)
    groups, width = data.draw(st.sampled_from([1, 1, 2, 3])), data.draw(st.integers(1, 2))
    channels, filters = groups * width, groups * data.draw(st.integers(1, 2))
    params: tuple[tuple[int, ...], ...] = ((filters, width, *kernel),)
    if data.draw(st.booleans()):
        params += ((filters,),)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    memory_format = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last, torch.channels_last_3d]))
    fn = partial(convolve, groups=groups, **options)
    check(SplitCase(fn, mesh, ((n, channels, *space),), params, dtype=dtype, memory_format=memory_format))


@on_grids
@given(data=st.data())
@pytest.mark.operator("convolution, 'same' and 'valid'", "odd and even kernels (asymmetric padding)")
def test_named_padding(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    kernel = per_dim(data, spatial, 1, 5)
    space = tuple(max(n, k) for n, k in zip(data.draw(extents(spatial)), kernel, strict=True))
    fn = partial(convolve, padding=data.draw(st.sampled_from(["same", "valid"])))
    check(SplitCase(fn, mesh, ((data.draw(batch_sizes(mesh)), 2, *space),), ((3, 2, *kernel), (3,))))


@on_grids
@draws(12)
@given(data=st.data())
@pytest.mark.operator("convolution, padding modes", "zeros, circular, reflect, replicate")
def test_padding_modes(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    kernel, padding = per_dim(data, spatial, 1, 4), per_dim(data, spatial, 0, 3)
    pairs = zip(data.draw(extents(spatial)), kernel, padding, strict=True)
    space = tuple(max(n, k, p + 1) for n, k, p in pairs)
    mode = data.draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    stride, in_one = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    fn = partial(convolve_module, mode=mode, padding=padding, stride=stride, in_one=in_one)
    check(SplitCase(fn, mesh, ((data.draw(batch_sizes(mesh)), 2, *space),), ((3, 2, *kernel), (3,))))


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator("transposed convolution", "any kernel, stride, dilation, padding, output_padding; groups; bias")
def test_transposed_convolution(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    kernel, stride, dilation = (per_dim(data, spatial, 1, top) for top in (4, 3, 2))
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    space = data.draw(extents(spatial, 1, 7))
    most = [((n - 1) * s + r - 1) // 2 for n, s, r in zip(space, stride, reach, strict=True)]
    padding = tuple(data.draw(st.integers(0, min(3, m))) for m in most)
    extra = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    groups = data.draw(st.sampled_from([1, 2]))
    fn = partial(
        convolve_transposed, stride=stride, padding=padding, output_padding=extra, groups=groups, dilation=dilation
    )
    params: tuple[tuple[int, ...], ...] = ((2 * groups, 2, *kernel),)
    if data.draw(st.booleans()):
        params += ((2 * groups,),)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    check(SplitCase(fn, mesh, ((data.draw(batch_sizes(mesh)), 2 * groups, *space),), params, dtype=dtype))


def conv_pool_norm(x: Any, weight: Any, gain: Any, bias: Any) -> Any:
    y = F.batch_norm(F.conv3d(x, weight, stride=2, padding=2), None, None, gain, bias, training=True)
    return F.max_pool3d(y, 3, 1, 1)


def test_samples_and_all_of_space_cut_at_once(check: Check) -> None:
    """16 ranks: every rank except those at the corners has neighbours in all directions, and some have no sample."""
    mesh = Mesh(data=2, depth=2, height=2, width=2)
    params = ((4, 2, 5, 4, 3), (4,), (4,))
    check(SplitCase(conv_pool_norm, mesh, ((3, 2, 9, 7, 11),), params))
    check(SplitCase(conv_pool_norm, mesh, ((1, 2, 6, 5, 4),), params))
