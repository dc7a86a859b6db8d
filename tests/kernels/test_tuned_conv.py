"""Convolutions by our own kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from convmesh.kernels.memory_format import CHANNELS_LAST
from convmesh.kernels.tuned.conv_configs import KernelConfig, cover, forward_configs, weight_configs
from convmesh.kernels.tuned.conv_shape import ConvShape
from convmesh.kernels.tuned.conv_table import ConvTable, Measured, best_rows, parse_table, shipped_table, write_table
from convmesh.runtime.compiled.tuned_convolutions import choose, has_triton, tune_convolutions

HAS_GPU = Path("/dev/nvidiactl").exists()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytest.importorskip("triton", None if HAS_GPU else "3.9", reason="older interpreters do not work with today's NumPy")


@pytest.fixture(autouse=True)
def _products_in_full_precision() -> Iterator[None]:
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


@st.composite
def convolutions(draw: st.DrawFn) -> ConvShape:
    dims = draw(st.integers(2, 3))
    kernel = draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims))
    stride = draw(st.lists(st.integers(1, 2), min_size=dims, max_size=dims))
    dilation = draw(st.lists(st.integers(1, 2), min_size=dims, max_size=dims))
    padding = [draw(st.integers(0, k)) for k in kernel]
    extents = [draw(st.integers(d * (k - 1) + 1, 6)) for k, d in zip(kernel, dilation, strict=True)]
    channels, filters = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    x = (draw(st.integers(1, 2)), channels, *extents)
    return ConvShape.of(x, (filters, channels, *kernel), stride, padding, dilation)


def _drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, device=DEVICE).contiguous(memory_format=torch.channels_last_3d)


def _gradients(
    shape: ConvShape, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rest = (shape.stride, shape.padding, shape.dilation, False, [0, 0, 0], 1)
    args = (t.double() for t in (grad, x, weight))
    dx, dw, db = torch.ops.aten.convolution_backward(*args, [shape.filters], *rest, [True, True, True])
    return dx, dw, db


def _small_groups(shape: ConvShape) -> Iterator[KernelConfig]:
    """As for large volumes, in tiles that the interpreter gets through."""
    for group in ((1, 1, 1), (1, 2, 4), (2, 3, 2)):
        columns = cover(prod(group) * shape.filters)
        for numbers in (16, 64):
            yield KernelConfig(2, 16, columns, numbers, 4, 1, 1, 0, deep=group[0], high=group[1], wide=group[2])


@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])  # the interpreter is slow
@given(convolutions(), st.data())
def test_kernels_compute_what_torch_computes(shape: ConvShape, data: st.DataObject) -> None:
    from convmesh.kernels.tuned import conv_launch

    torch.manual_seed(0)
    x, weight = (
        _drawn(shape.samples, shape.channels, *shape.extents),
        _drawn(shape.filters, shape.channels, *shape.kernel),
    )
    bias, grad = torch.randn(shape.filters, device=DEVICE), _drawn(shape.samples, shape.filters, *shape.out)
    config = data.draw(st.sampled_from([*forward_configs(shape), *_small_groups(shape)]))
    y = conv_launch.convolve(x, weight, bias, shape, config)
    rest = (shape.stride, shape.padding, shape.dilation)
    expected = torch.conv3d(x.double(), weight.double(), bias.double(), *rest)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    dx, dw, db = _gradients(shape, x, weight, grad)
    config = data.draw(st.sampled_from(list(weight_configs(shape, 4))))
    of_weight, of_bias = conv_launch.weight_gradient(grad, x, shape, config, has_bias=True)
    torch.testing.assert_close(of_weight.double(), dw, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(of_bias.double(), db, rtol=1e-5, atol=1e-4)
    mirror = shape.mirrored()
    if mirror is not None:
        config = data.draw(st.sampled_from([*weight_configs(mirror, 4)]))
        swapped = replace(config, swapped=1)
        of_weight, of_bias = conv_launch.weight_gradient(grad, x, shape, swapped, has_bias=True)
        torch.testing.assert_close(of_weight.double(), dw, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(of_bias.double(), db, rtol=1e-5, atol=1e-4)
        config = data.draw(st.sampled_from([*forward_configs(mirror), *_small_groups(mirror)]))
        of_input = conv_launch.input_gradient(grad, weight, shape, config)
        torch.testing.assert_close(of_input.double(), dx, rtol=1e-5, atol=1e-4)


def _traced(dims: int, bias: bool) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    torch.manual_seed(1)
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    x = torch.randn(1, 3, *[4] * dims, device=DEVICE).contiguous(memory_format=last)
    weight = torch.randn(4, 3, *[3] * dims, device=DEVICE).contiguous(memory_format=last)
    rest: list[Any] = [[1] * dims, [1] * dims, [1] * dims, False, [0] * dims, 1]

    def step(x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.ops.aten.convolution(x, weight, shift if bias else None, *rest)
        grads = torch.ops.aten.convolution_backward(y.sin(), x, weight, [4], *rest, [True, True, bias])
        return y, grads[0] * 2, grads[1] * 2, *([grads[2]] if bias else [])

    inputs = [x, weight, torch.randn(4, device=DEVICE)]
    return make_fx(step, tracing_mode="fake")(*inputs), inputs


CONFIG = KernelConfig(rows=1, columns=16, filters=16, taps=32, warps=4, stages=2, walk=2, flat=0, parts=3)


@pytest.mark.parametrize("phases", [("forward",), ("input",), ("weight",), ("forward", "input", "weight")])
@pytest.mark.parametrize(("dims", "bias"), [(2, True), (3, False)])
def test_a_step_computes_the_same_with_our_kernels(phases: tuple[str, ...], dims: int, bias: bool) -> None:
    module, inputs = _traced(dims, bias)
    expected = module(*inputs)
    tune_convolutions(module.graph, lambda phase, *_: CONFIG if phase in phases else None)
    module.graph.lint()
    module.recompile()
    ours = {str(n.target) for n in module.graph.nodes if "convmesh" in str(n.target)}
    assert len(ours) == len(phases)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.convmesh.conv.default):
        assert node.meta["val"].is_contiguous(memory_format=CHANNELS_LAST[dims + 2])
    for got, wanted in zip(module(*inputs), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("late", [False, True])
def test_the_sum_for_a_bias_is_taken_where_the_gradient_is_read_anyway(late: bool) -> None:
    rest: list[Any] = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]

    def step(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        early = None if late else grad.sum([0, 2, 3]) * 3
        dw = torch.ops.aten.convolution_backward(grad, x, weight, [4], *rest, [False, True, False])[1]
        return dw * 2, grad.sum([0, 2, 3]) * 3 if early is None else early

    torch.manual_seed(1)
    last = torch.channels_last
    sizes = ((1, 3, 4, 4), (4, 3, 3, 3), (1, 4, 4, 4))
    inputs = [torch.randn(size, device=DEVICE).contiguous(memory_format=last) for size in sizes]
    module = make_fx(step, tracing_mode="fake")(*inputs)
    expected = module(*inputs)
    tune_convolutions(module.graph, lambda *_: CONFIG)
    module.graph.lint()
    module.recompile()
    sums = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    assert len(sums) == (0 if late else 1)  # what is needed before the kernel stays
    for got, wanted in zip(module(*inputs), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_groups_transposed_and_plain_tensors_are_left_to_torch() -> None:
    module, _ = _traced(2, False)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        node.args[0].meta["val"] = node.args[0].meta["val"].contiguous()
    before = str(module.graph)
    tune_convolutions(module.graph, lambda phase, *_: CONFIG if phase == "forward" else None)
    assert str(module.graph) == before


SHAPE = ConvShape.of((8, 4, 128, 128, 128), (32, 4, 3, 3, 3), [1] * 3, [1] * 3, [1] * 3)
WIDE = KernelConfig(1, 128, 32, 32, 4, 3, 16, 0)


def test_a_table_is_read_as_it_was_written() -> None:
    table = ConvTable("A GPU", (Measured("forward", SHAPE, "bfloat16", WIDE, 1e-3, 4e-3),))
    text = write_table(table, {"date": "today"})
    assert parse_table(text, "A GPU") == table


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"format": 1, "device": "Another GPU", "rows": []}', "its device is 'Another GPU', not 'A GPU'"),
        ('{"format": 0, "device": "A GPU", "rows": []}', "its format is 0, not 1"),
        ('{"format": 1, "device": "A GPU", "rows": [{"phase": "forward"}]}', "missing 5 required positional arguments"),
        ('{"format": 1, "device": "A GPU"}', "'rows'"),
        ('{"format": 1,', "Expecting property name"),
    ],
)
def test_a_table_that_does_not_fit_is_ignored_with_one_line_that_says_why(
    text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_table(text, "A GPU") is None
    [line] = caplog.messages
    assert line.startswith("The table of tuned convolutions for A GPU is ignored, torch computes them:")
    assert why in line


def test_a_gpu_without_a_table_is_left_to_torch_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "convmesh"):
        assert shipped_table("Imaginary GPU") is None
        assert shipped_table("Imaginary GPU") is None  # asked for every convolution of a step
    assert caplog.messages == ["There is no table of tuned convolutions for Imaginary GPU: torch computes them"]


def test_without_triton_torch_computes_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it fails
    has_triton.cache_clear()
    try:
        with FakeTensorMode(), caplog.at_level(logging.INFO, "convmesh"):
            x = torch.empty(1, 4, 8, 8, 8, device="cuda")
            assert [choose("forward", SHAPE, x) for _ in range(2)] == [None, None]
    finally:
        has_triton.cache_clear()
    assert caplog.messages == ["Triton is not installed: torch computes all convolutions"]


def test_of_several_measurements_the_fastest_is_kept() -> None:
    slow, fast = (Measured("forward", SHAPE, "bfloat16", WIDE, seconds, 4e-3) for seconds in (2e-3, 1e-3))
    assert best_rows([slow, fast]) == best_rows([fast, slow]) == (fast,)


def test_a_kernel_is_chosen_only_where_a_measurement_speaks_for_it() -> None:
    table = ConvTable("A GPU", (Measured("forward", SHAPE, "bfloat16", WIDE, 1e-3, 4e-3),))
    fewer_samples = ConvShape.of((1, 4, 64, 128, 128), (32, 4, 3, 3, 3), [1] * 3, [1] * 3, [1] * 3)
    assert table.config_for("forward", SHAPE, "bfloat16") == WIDE
    assert table.config_for("forward", fewer_samples, "bfloat16") == WIDE
    assert table.config_for("weight", SHAPE, "bfloat16") is None
    assert table.config_for("forward", SHAPE, "float32") is None
    tiny = ConvShape.of((1, 4, 4, 4, 128), (32, 4, 3, 3, 3), [1] * 3, [1] * 3, [1] * 3)
    narrow = ConvShape.of((8, 4, 128, 128, 100), (32, 4, 3, 3, 3), [1] * 3, [1] * 3, [1] * 3)
    assert table.config_for("forward", tiny, "bfloat16") is None
    assert table.config_for("forward", narrow, "bfloat16") is None
    no_gain = ConvTable("A GPU", (Measured("forward", SHAPE, "bfloat16", WIDE, 3.9e-3, 4e-3),))
    assert no_gain.config_for("forward", SHAPE, "bfloat16") is None
