"""Convolutions in slabs: the numbers of whole ones, and no padded copy. What is large is small here."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from convmesh.kernels import slab_conv
from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.local_conv import convolution, convolution_backward
from convmesh.kernels.local_conv_transpose import conv_transpose
from convmesh.kernels.memory_format import CHANNELS_LAST

TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@pytest.fixture(scope="module", autouse=True)
def small_slabs() -> Iterator[None]:
    """Samples of 64 elements are large, and slabs have 32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab_conv, "CLIFF", 64)
        patch.setattr(slab_conv, "SLAB", 32)
        slab_conv._slab_conv.cache_clear()
        yield
    slab_conv._slab_conv.cache_clear()


def per_dim(dims: int, least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(least, most)] * dims)


@st.composite
def cases(draw: st.DrawFn, transposed: bool = False) -> tuple[torch.Tensor, torch.Tensor, ConvParams]:
    """An input, a weight and arguments with which a convolution has an output."""
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kernel, stride, dilation = (draw(per_dim(dims, 1, most)) for most in (3, 3, 2))
    reaches = tuple(d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    extents = draw(per_dim(dims, 2, 9))
    padding = draw(per_dim(dims, 0, 4))
    outs = [
        (n - 1) * s - 2 * p + r + 1 if transposed else n + 2 * p - r
        for n, s, p, r in zip(extents, stride, padding, reaches, strict=True)
    ]
    assume(min(outs) > 0)
    samples, channels, filters = (draw(st.integers(1, 3)) for _ in range(3))
    first, second = (channels * groups, filters) if transposed else (filters * groups, channels)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(samples, channels * groups, *extents, generator=generator, dtype=torch.float64)
    weight = torch.randn(first, second, *kernel, generator=generator, dtype=torch.float64)
    if draw(st.booleans()) and dims > 1:
        x = x.contiguous(memory_format=CHANNELS_LAST[dims + 2])
    return x, weight, ConvParams(stride, padding, dilation, groups)


@given(cases())
def test_slabs_have_the_numbers_of_the_whole(case: tuple[torch.Tensor, torch.Tensor, ConvParams]) -> None:
    x, weight, params = case
    bias = torch.linspace(-1, 1, len(weight), dtype=torch.float64)
    y = torch.ops.aten.convolution(x, weight, bias, *params.of_aten)
    torch.testing.assert_close(convolution(x, weight, bias, params, "cuda"), y)
    dy = torch.randn_like(y)
    dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, weight, None, *params.of_aten, [True, True, False])
    found = convolution_backward(dy, x, weight, params, (True, True), "cuda")
    torch.testing.assert_close(found, (dx, dw))
    assert convolution_backward(dy, x, weight, params, (True, False), "cuda")[1] is None
    assert convolution_backward(dy, x, weight, params, (False, True), "cuda")[0] is None


@given(cases(transposed=True))
def test_transposed_ones_too(case: tuple[torch.Tensor, torch.Tensor, ConvParams]) -> None:
    x, weight, params = case
    bias = torch.linspace(-1, 1, weight.shape[1] * params.groups, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    y = TRANSPOSED[x.dim() - 2](*leaves, params.stride, params.padding, 0, params.groups, params.dilation)
    in_slabs = conv_transpose(x, weight, bias, params, "cuda")
    torch.testing.assert_close(in_slabs, y)
    dy = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(in_slabs, leaves, dy), torch.autograd.grad(y, leaves, dy))


def shapes_of_calls(shape: tuple[int, ...], params: ConvParams, kind: str) -> list[tuple[int, ...]]:
    """Shapes that convolutions and paddings read, forward and backward."""
    x, weight = torch.randn(shape), torch.randn(4, shape[1], 3, 3)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as seen:
        y = convolution(x, weight, None, params, kind)
        convolution_backward(torch.ones_like(y), x, weight, params, (True, True), kind)
    names = ("aten::convolution", "aten::convolution_backward", "aten::constant_pad_nd")
    return [
        tuple(event.input_shapes[name == "aten::convolution_backward"])
        for event in seen.events()
        for name in names
        if event.name == name
    ]


SAME = ConvParams((1, 1), (1, 1), (1, 1), 1)


def test_nothing_as_large_as_the_input_is_copied() -> None:
    slabs = shapes_of_calls((1, 2, 16, 4), SAME, "cuda")
    assert max(shape[2] for shape in slabs) <= 2 + 4, "two rows of 16 elements, and two at each side"
    assert len(slabs) > 16


@pytest.mark.parametrize(("shape", "kind"), [((1, 2, 16, 4), "cpu"), ((8, 2, 3, 4), "cuda")], ids=str)
def test_processors_and_small_samples_have_one_call(shape: tuple[int, ...], kind: str) -> None:
    assert {seen[2] for seen in shapes_of_calls(shape, SAME, kind)} == {shape[2]}


def test_empty_batches_have_results() -> None:
    x, weight = torch.randn(0, 2, 16, 4), torch.randn(4, 2, 3, 3)
    y = convolution(x, weight, None, SAME, "cuda")
    assert y.shape == (0, 4, 16, 4)
    dx, dw = convolution_backward(y, x, weight, SAME, (True, True), "cuda")
    assert dx is not None
    assert dx.shape == x.shape
    assert dw is not None
    assert not dw.any()
