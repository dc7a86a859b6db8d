"""The indices that operators declare as needed, against those that torch's operators read."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from convmesh.layout import Layout, Mesh, Span
from convmesh.layout.borders import PaddingMode
from convmesh.layout.maps import (
    DimMap,
    Padded,
    Placed,
    Same,
    Spread,
    Strided,
    Transposed,
    Whole,
    Window,
    demand,
    out_shape,
)

Operator = Callable[[torch.Tensor], torch.Tensor]

small = st.integers(1, 4)


def run(operator: Operator, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.ones(1, 1, extent, dtype=torch.float64, requires_grad=True)
    return x, operator(x)


def reads(x: torch.Tensor, y: torch.Tensor, out: Span) -> set[int]:
    """The input indices that the outputs of `out` depend on; all weights are positive, so nothing cancels."""
    (grad,) = torch.autograd.grad(y[..., out.slice()].sum(), x, retain_graph=True)
    return set(grad.flatten().nonzero().flatten().tolist())


def needs(dim_map: DimMap, out: Span, extent: int) -> set[int]:
    spans = dim_map.needs(out, extent)
    assert all(0 <= span.start < span.stop <= extent for span in spans)
    assert all(a.stop < b.start for a, b in itertools.pairwise(spans))
    return {i for span in spans for i in range(*span)}


def any_span(data: st.DataObject, extent: int) -> Span:
    start = data.draw(st.integers(0, extent - 1))
    return Span(start, data.draw(st.integers(start + 1, extent)))


def check(dim_map: DimMap, operator: Operator, extent: int, data: st.DataObject, gaps: bool = False) -> None:
    """The output extents agree, and exactly the indices read are needed; with `gaps` also those in between."""
    x, y = run(operator, extent)
    assert dim_map.out_extent(extent) == y.shape[-1]
    assume(y.shape[-1] > 0)
    out = any_span(data, y.shape[-1])
    read, needed = reads(x, y, out), needs(dim_map, out, extent)
    assert read <= needed
    if not gaps:
        assert needed == read


def conv(x: torch.Tensor, window: Window) -> torch.Tensor:
    kernel = torch.ones(1, 1, window.kernel, dtype=torch.float64)
    mode = "constant" if window.mode == "zeros" else window.mode
    return F.conv1d(F.pad(x, (window.low, window.high), mode), kernel, stride=window.stride, dilation=window.dilation)


@settings(max_examples=200)
@given(small, small, st.integers(1, 3), st.sampled_from(["zeros", "circular", "reflect", "replicate"]), st.data())
def test_convolution(kernel: int, stride: int, dilation: int, mode: PaddingMode, data: st.DataObject) -> None:
    extent = data.draw(st.integers(1, 14))
    most = {"circular": extent, "reflect": extent - 1}.get(mode, 5)
    low, high = data.draw(st.integers(0, most)), data.draw(st.integers(0, most))
    window = Window(kernel, stride, dilation, low, high, mode)
    if window.reach > extent + low + high:
        assert window.out_extent(extent) == 0
        return
    # Local convolutions take one contiguous run, so indices that stride or dilation skip inside it are fetched too.
    gaps = dilation > 1 or stride > kernel
    check(window, lambda x: conv(x, window), extent, data, gaps)


@settings(max_examples=200)
@given(st.integers(1, 5), small, st.integers(1, 3), st.booleans(), st.data())
def test_max_pooling(kernel: int, stride: int, dilation: int, ceil: bool, data: st.DataObject) -> None:
    extent, pad = data.draw(st.integers(1, 14)), data.draw(st.integers(0, kernel // 2))
    window = Window(kernel, stride, dilation, pad, pad, ceil=ceil)
    x = torch.zeros(1, 1, extent)
    try:
        expected = F.max_pool1d(x, kernel, stride, pad, dilation, ceil).shape[-1]
    except RuntimeError:  # torch refuses empty outputs
        expected = 0
    assert window.out_extent(extent) == expected


@settings(max_examples=200)
@given(st.integers(1, 5), small, st.booleans(), st.data())
def test_average_pooling(kernel: int, stride: int, ceil: bool, data: st.DataObject) -> None:
    extent, pad = data.draw(st.integers(1, 14)), data.draw(st.integers(0, kernel // 2))
    window = Window(kernel, stride, low=pad, high=pad, ceil=ceil)
    assume(window.out_extent(extent) > 0)
    check(window, lambda x: F.avg_pool1d(x, kernel, stride, pad, ceil), extent, data, gaps=stride > kernel)


@settings(max_examples=100)
@given(small, st.integers(2, 4), st.integers(1, 14), st.data())
def test_a_thin_box_of_a_dilated_convolution_needs_only_the_taps(
    kernel: int, dilation: int, extent: int, data: st.DataObject
) -> None:
    pad = data.draw(st.integers(0, 4))
    window = Window(kernel, 1, dilation, pad, pad)
    assume(window.out_extent(extent) > 0)
    x, y = run(lambda x: conv(x, window), extent)
    start = data.draw(st.integers(0, y.shape[-1] - 1))
    out = Span(start, min(y.shape[-1], start + data.draw(st.integers(1, dilation - 1))))
    assert needs(window, out, extent) == reads(x, y, out)


@pytest.mark.parametrize(("extent", "expected"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_a_ceil_mode_window_larger_than_the_input_is_kept(extent: int, expected: int) -> None:
    pad = 1 if extent == 1 else 0
    assert F.max_pool1d(torch.zeros(1, 1, extent), 3, 2, pad, 1, True).shape[-1] == expected
    assert Window(3, 2, low=pad, high=pad, ceil=True).out_extent(extent) == expected


@settings(max_examples=200)
@given(small, small, st.integers(1, 3), st.data())
def test_transposed_convolution(kernel: int, stride: int, dilation: int, data: st.DataObject) -> None:
    extent = data.draw(st.integers(1, 8))
    output_padding = data.draw(st.integers(0, max(stride, dilation) - 1))
    padding = data.draw(st.integers(0, 3))
    transposed = Transposed(kernel, stride, dilation, padding, output_padding)
    assume((extent - 1) * stride - 2 * padding + transposed.reach + output_padding > 0)
    weight = torch.ones(1, 1, kernel, dtype=torch.float64)
    check(
        transposed,
        lambda x: F.conv_transpose1d(x, weight, None, stride, padding, output_padding, 1, dilation),
        extent,
        data,
        gaps=dilation > 1,
    )


@settings(max_examples=150)
@given(st.sampled_from(["zeros", "circular", "reflect", "replicate"]), st.data())
def test_padding_and_cropping(mode: PaddingMode, data: st.DataObject) -> None:
    extent = data.draw(st.integers(1, 9))
    most = {"circular": extent, "reflect": extent - 1}.get(mode, 5)
    low, high = data.draw(st.integers(-3, most)), data.draw(st.integers(-3, most))
    assume(extent + min(low, 0) + min(high, 0) > 0)
    assume(mode != "circular" or low * high >= 0)  # torch wraps what is left after cropping, or fails
    torch_mode = "constant" if mode == "zeros" else mode
    check(Padded(low, high, mode), lambda x: F.pad(x, (low, high), torch_mode), extent, data)


@settings(max_examples=100)
@given(st.integers(1, 12), st.integers(1, 4), st.data())
def test_slices(extent: int, step: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, extent - 1))
    stop = data.draw(st.integers(start + 1, extent))
    count = len(range(start, stop, step))
    check(Strided(start, step, count), lambda x: x[..., start:stop:step], extent, data, gaps=step > 1)


@given(st.integers(1, 12), st.data())
def test_flip(extent: int, data: st.DataObject) -> None:
    check(Strided(extent - 1, -1, extent), lambda x: x.flip(-1), extent, data)


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 5), st.data())
def test_concatenation(extent: int, before: int, after: int, data: st.DataObject) -> None:
    first, last = (torch.ones(1, 1, n, dtype=torch.float64) for n in (before, after))
    placed = Placed(before, before + extent + after)
    check(placed, lambda x: torch.cat([first, x, last], -1), extent, data)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_dense_layers_broadcasting_and_elementwise_work(extent: int, out: int, data: st.DataObject) -> None:
    check(Whole(out), lambda x: x @ torch.ones(extent, out, dtype=torch.float64), extent, data)
    check(Spread(out), lambda x: x.expand(1, 1, out), 1, data)
    check(Same(), torch.exp, extent, data)


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_a_demand_holds_the_needs_of_every_part(extent: int, ranks: int, data: st.DataObject) -> None:
    maps = (Same(), Window(3, low=1, high=1, mode="circular"))
    work = Layout.of(Mesh(width=ranks), out_shape(maps, (2, extent)), {1: "width"})
    demands = demand(work, maps, (2, extent))
    for rank in range(ranks):
        out = work.box(rank).spans[1]
        expected = maps[1].needs(out, extent) if out.extent else ()
        assert demands.region(rank).dims == ((Span(0, 2),), expected)
