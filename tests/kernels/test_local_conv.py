"""Local convolutions: same numbers as torch's in float64, and no slow kernel on a small shard."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.local_conv import convolution, convolution_backward
from convmesh.testing import RankPool

FORMATS = st.sampled_from([torch.contiguous_format, torch.channels_last_3d])


def aten(params: ConvParams) -> tuple[Any, ...]:
    return list(params.stride), list(params.padding), list(params.dilation), False, [0] * 3, params.groups


def draw_triple(data: st.DataObject, smallest: int, largest: int) -> tuple[int, ...]:
    return tuple(data.draw(st.integers(smallest, largest)) for _ in range(3))


@settings(max_examples=60)
@given(data=st.data())
def test_forward_and_gradients(data: st.DataObject) -> None:
    """Any stride, padding (even wider than the kernel), dilation, format, samples; float32 takes the oneDNN paths."""
    pointwise = data.draw(st.booleans())
    kernel = (1, 1, 1) if pointwise else draw_triple(data, 1, 3)
    plain = pointwise or data.draw(st.booleans())
    stride, dilation = ((1, 1, 1) if plain else draw_triple(data, 1, most) for most in (3, 2))
    padding = (0, 0, 0) if pointwise else draw_triple(data, 0, 3)
    extents = draw_triple(data, 1, 7)
    assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(extents, padding, dilation, kernel, strict=True)))
    params = ConvParams(stride, padding, dilation, 1)
    samples, channels, filters = (
        data.draw(st.integers(1, 2)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 4)),
    )
    compare((samples, channels, *extents), (filters, channels, *kernel), params, data.draw(FORMATS), data.draw(FORMATS))


def compare(
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    params: ConvParams,
    format_x: torch.memory_format,
    format_dy: torch.memory_format,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).contiguous(memory_format=format_x)
    weight, bias = torch.randn(weight_shape, generator=generator), torch.randn(weight_shape[0], generator=generator)
    wide_x, wide_weight = x.double(), weight.double()
    y = torch.ops.aten.convolution(wide_x, wide_weight, bias.double(), *aten(params))
    dy = torch.randn(y.shape, generator=generator).contiguous(memory_format=format_dy)
    every = [True, True, False]
    expected = torch.ops.aten.convolution_backward(dy.double(), wide_x, wide_weight, None, *aten(params), every)
    gradients = convolution_backward(dy, x, weight, params, (True, True), "cpu")
    assert convolution_backward(dy, x, weight, params, (False, False), "cpu") == (None, None)
    y_here = convolution(x, weight, bias, params, "cpu")
    for ours, theirs in zip((y_here, *gradients), (y, *expected[:2]), strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5 * max(1.0, theirs.abs().max().item()))


def kernels_of_a_small_shard(channels: int, filters: int, extents: tuple[int, ...]) -> set[str]:
    """Names of the operators that run in a forward and backward pass."""
    last = torch.channels_last_3d
    x = torch.randn(1, channels, *extents).contiguous(memory_format=last)
    dy = torch.randn(1, filters, *extents).contiguous(memory_format=last)
    weight = torch.randn(filters, channels, 3, 3, 3)
    params = ConvParams((1,) * 3, (1,) * 3, (1,) * 3, 1)
    with torch.profiler.profile(acc_events=True) as seen:
        convolution(x, weight, None, params, "cpu")
        convolution_backward(dy, x, weight, params, (True, True), "cpu")
    return {event.name for event in seen.events()}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize(("channels", "filters"), [(8, 8), (1, 8), (16, 8)])
def test_small_shards_stay_in_onednn(channels: int, filters: int, pools: dict[int, RankPool]) -> None:
    (names,) = pools[1].run(kernels_of_a_small_shard, channels, filters, (8, 32, 32))
    assert "aten::mkldnn_convolution" in names
    # Neither ATen's fallback nor oneDNN by copies to its own format.
    assert not {name for name in names if "slow" in name or "to_mkldnn" in name}


FEW_CHANNELS = """
import torch
from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.local_conv import convolution_backward
torch.set_num_threads(1)
params, last = ConvParams((2, 2), (0, 0), (1, 1), 1), torch.channels_last
for _ in range(200):
    x, grad = (torch.randn(shape).to(memory_format=last) for shape in ((2, 4, 16, 16), (2, 8, 8, 8)))
    convolution_backward(grad, x, torch.randn(8, 4, 1, 1).to(memory_format=last), params, (True, True), "cpu")
"""


def test_gradients_of_few_channels_stay_in_their_memory() -> None:
    """Called as it stands, oneDNN ends such a process on an EPYC without AVX-512."""
    environment = {**os.environ, "MALLOC_CHECK_": "3"}
    subprocess.run([sys.executable, "-c", FEW_CHANNELS], check=True, timeout=300, env=environment)
