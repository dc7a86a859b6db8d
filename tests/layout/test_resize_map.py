"""Source indices and weights of interpolation against those of torch's own kernels, bit for bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from convmesh.layout import Span
from convmesh.layout.resize import Arithmetic, Method, Repeated, Resized, step_of
from convmesh.ops.shape.resize_rounding import linear_arithmetic

EXTENTS = [*range(1, 24), 41, 64, 97, 128, 500]
OUTS = [*range(1, 24), 41, 47, 55, 83, 97, 110, 127, 200, 1000]
SCALES = (0.3, 1 / 3, 0.5, 0.61, 0.75, 0.9, 1.05, 1.25, 1.3, 1.5, 1.7, 1.9, 2.0, 2.1, 2.5, 3.0, 6.1, 41.0)
MODES: dict[str, Method] = {"nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "linear"}


def sizes(extent: int) -> list[tuple[int, float | None]]:
    by_scale: list[tuple[int, float | None]] = [(int(extent * s), s) for s in SCALES if int(extent * s)]
    return by_scale + [(out, None) for out in OUTS]


def arguments(out: int, scale: float | None) -> dict[str, Any]:
    return {"size": out} if scale is None else {"scale_factor": scale}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_indices_are_those_of_torch(mode: str, dtype: torch.dtype) -> None:
    arithmetic: Arithmetic = "double" if dtype == torch.float64 else "fused"
    for extent in EXTENTS:
        for out, scale in sizes(extent):
            x = torch.arange(extent, dtype=dtype).view(1, 1, -1)
            expected = F.interpolate(x, mode=mode, **arguments(out, scale)).flatten().long()
            step = step_of(extent, out, scale, False, arithmetic)
            indices = Resized(MODES[mode], out, step, arithmetic=arithmetic).taps(Span(0, out), extent).indices[0]
            assert np.array_equal(indices, expected.numpy()), (extent, out, scale)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_small_images_round_in_float32_for_every_type(mode: str) -> None:
    for extent in range(1, 40):
        for out in range(1, 100):
            x = torch.arange(extent, dtype=torch.float64).view(1, 1, -1, 1)
            expected = F.interpolate(x, size=(out, 1), mode=mode).flatten().long()
            resized = Resized(MODES[mode], out, step_of(extent, out, None, False, "single"), arithmetic="single")
            assert np.array_equal(resized.taps(Span(0, out), extent).indices[0], expected.numpy()), (extent, out)


@pytest.mark.parametrize("align_corners", [False, True])
def test_linear_weights_are_those_of_torch(align_corners: bool) -> None:
    """Zeros at even indices and ones at odd ones show the weight of one tap without any rounding of sums."""
    arithmetic = linear_arithmetic()
    for extent in EXTENTS:
        for out, scale in sizes(extent):
            if out == extent:
                continue  # torch copies for any scale
            x = (torch.arange(extent) % 2).float().view(1, 1, -1)
            expected = F.interpolate(x, mode="linear", align_corners=align_corners, **arguments(out, scale)).flatten()
            step = step_of(extent, out, scale, align_corners, arithmetic)
            resized = Resized("linear", out, step, align_corners, arithmetic)
            indices, weights = resized.taps(Span(0, out), extent)
            assert weights is not None
            assert np.array_equal((weights * (indices % 2)).sum(0), expected.numpy()), (extent, out, scale)


@given(data=st.data())
@settings(max_examples=60)
def test_cubic_weights_are_those_of_torch(data: st.DataObject) -> None:
    extent, out = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 40))
    align_corners = data.draw(st.booleans())
    x = torch.randn(1, 1, extent, 1, dtype=torch.float64)
    expected = F.interpolate(x, size=(out, 1), mode="bicubic", align_corners=align_corners).flatten()
    step = step_of(extent, out, None, align_corners, "double")
    indices, weights = Resized("cubic", out, step, align_corners, "double").taps(Span(0, out), extent)
    assert weights is not None
    interpolated = (weights * x.flatten().numpy()[indices]).sum(0)
    assert np.allclose(interpolated, expected.numpy(), rtol=0, atol=1e-12)


@given(data=st.data())
@settings(max_examples=200)
def test_part_of_a_dim_reads_what_it_needs_and_no_more(data: st.DataObject) -> None:
    method: Method = data.draw(st.sampled_from(["nearest", "nearest-exact", "linear", "cubic"]))
    extent, resized, out = drawn(data, method)
    (needed,) = resized.needs(out, extent)
    whole, part = resized.taps(Span(0, resized.out), extent), resized.taps(out, extent)
    assert np.array_equal(part.indices, whole.indices[:, out.slice()])
    assert needed.start >= 0
    assert needed.stop <= extent
    assert out == Span(0, resized.out) or (part.indices.min(), part.indices.max() + 1) == needed


@given(data=st.data())
@settings(max_examples=200)
def test_part_of_a_dim_as_a_separate_resize(data: st.DataObject) -> None:
    method: Method = data.draw(st.sampled_from(["nearest", "nearest-exact", "linear", "cubic"]))
    extent, resized, out = drawn(data, method)
    (held,) = resized.needs(out, extent)
    alone = resized.alone(out, held, extent)
    assume(alone is not None)
    assert alone is not None
    step = step_of(held.extent, alone.extent, None, resized.align_corners, "fused")
    mine = Resized(method, alone.extent, step, resized.align_corners).taps(alone.kept, held.extent)
    theirs = resized.taps(out, extent)
    assert np.array_equal(mine.indices + held.start, theirs.indices)
    if mine.weights is not None and theirs.weights is not None:
        assert np.array_equal(mine.weights, theirs.weights)


def test_doubling_always_has_a_separate_resize() -> None:
    for extent, start in ((7, 0), (8, 3), (12, 5)):
        methods: tuple[Method, ...] = ("nearest", "linear", "cubic")
        for method in methods:
            resized = Resized(method, 2 * extent, 0.5)
            out = Span(start, 2 * extent - 1)
            (held,) = resized.needs(out, extent)
            assert resized.alone(out, held, extent) is not None


def drawn(data: st.DataObject, method: Method) -> tuple[int, Resized, Span]:
    """An extent, a resize of it and part of its output; steps such as 1/2 are as frequent as others."""
    extent = data.draw(st.integers(1, 40))
    scale = data.draw(st.sampled_from([None, 0.5, 2.0, 4.0, 1.7]))
    align_corners = method in ("linear", "cubic") and data.draw(st.booleans())
    out = data.draw(st.integers(1, 60)) if scale is None else math.floor(extent * scale)
    assume(out > 0)
    resized = Resized(method, out, step_of(extent, out, scale, align_corners, "fused"), align_corners)
    start = data.draw(st.integers(0, out - 1))
    return extent, resized, Span(start, data.draw(st.integers(start + 1, out)))


@given(data=st.data())
def test_pixel_shuffle_reads_the_pixels_it_cuts_through(data: st.DataObject) -> None:
    factor, extent = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    repeated = Repeated(factor)
    assert repeated.out_extent(extent) == factor * extent
    start = data.draw(st.integers(0, factor * extent - 1))
    out = Span(start, data.draw(st.integers(start + 1, factor * extent)))
    (needed,) = repeated.needs(out, extent)
    assert set(range(*needed)) == {o // factor for o in range(*out)}
