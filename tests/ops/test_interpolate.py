"""Interpolation, including upsampling modules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from convmesh import Mesh, UnsupportedError, shard
from convmesh.ops.shape.interpolate import METHODS
from convmesh.testing import RankPool, SplitCase, opened
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]

SCALES = st.sampled_from([0.3, 0.5, 0.75, 1.0, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0])


def modes(dims: int) -> list[str]:
    return [mode for mode, (_, supported) in METHODS.items() if dims in supported]


def resized(x: Any, **options: Any) -> Any:
    return F.interpolate(x, **options)


def upsampled(x: Any, **options: Any) -> Any:
    return nn.Upsample(**options)(x)


def doubled(x: Any) -> Any:
    return nn.UpsamplingBilinear2d(scale_factor=2)(nn.UpsamplingNearest2d(scale_factor=2)(x))


def draw_size(data: st.DataObject, shape: tuple[int, ...]) -> dict[str, Any]:
    if data.draw(st.booleans()):
        size = data.draw(extents(len(shape)))
        return {"size": size[0] if data.draw(st.booleans()) else size}
    scales = data.draw(st.one_of(SCALES, st.tuples(*[SCALES] * len(shape))))
    options = {"scale_factor": scales}
    if data.draw(st.booleans()):
        options["recompute_scale_factor"] = data.draw(st.booleans())
    listed = scales if isinstance(scales, tuple) else (scales,) * len(shape)
    assume(all(int(n * s) for n, s in zip(shape, listed, strict=True)))
    return options


def torch_forgets_the_scale(shape: tuple[int, ...], options: dict[str, Any]) -> bool:
    """For equal and doubled extents, torch's CPU backward of nearest uses only the extents, its forward the scale."""
    if "size" in options or options.get("recompute_scale_factor"):
        return False
    scales = options["scale_factor"]
    listed = scales if isinstance(scales, tuple) else (scales,) * len(shape)
    pairs = zip(shape, listed, strict=True)
    return any(int(n * s) == n * whole and s != whole for n, s in pairs for whole in (1, 2))


@on_grids
@given(data=st.data())
@draws(25)
@pytest.mark.operator("interpolate", "nearest, nearest-exact, linear, bilinear, trilinear, bicubic; size, scale_factor")
def test_interpolate(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(batch_sizes(mesh)), 2, *data.draw(extents(spatial)))
    options = draw_size(data, shape[2:]) | {"mode": data.draw(st.sampled_from(modes(spatial)))}
    if "nearest" in options["mode"]:
        assume(not torch_forgets_the_scale(shape[2:], options))
    else:
        options["align_corners"] = data.draw(st.sampled_from([None, False, True]))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    check(SplitCase(partial(resized, **options), mesh, (shape,), dtype=dtype))


@on_grids
@given(data=st.data())
@draws(8)
@pytest.mark.operator("nn.Upsample, by 2 and 4", "all modes; torch's own kernel on each shard")
def test_upsampling_by_powers_of_two(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(batch_sizes(mesh)), 2, *data.draw(extents(spatial, largest=9)))
    factor = data.draw(st.sampled_from([2, 4, (2, 1, 4)[:spatial]]))
    fn = partial(upsampled, scale_factor=factor, mode=data.draw(st.sampled_from(modes(spatial))))
    layout = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last, torch.channels_last_3d]))
    check(SplitCase(fn, mesh, (shape,), memory_format=layout))


@on_grids
@pytest.mark.operator("nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d", "scale_factor")
def test_upsampling_modules(mesh: Mesh, check: Check) -> None:
    if "depth" not in mesh.axes:
        check(SplitCase(doubled, mesh, ((2, 3, 5, 7),)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("interpolate, area", "size, scale_factor")
def test_area(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(batch_sizes(mesh)), 2, *data.draw(extents(spatial)))
    options = draw_size(data, shape[2:]) | {"mode": "area"}
    check(SplitCase(partial(resized, **options), mesh, (shape,)))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_large_images_keep_float32_weights(mode: str, check: Check) -> None:
    """Near index 1,000, rounding a position once too often exceeds the tolerance."""
    fn = partial(resized, size=(1531, 3), mode=mode)
    check(SplitCase(fn, Mesh(height=2), ((1, 1, 1021, 2),), dtype=torch.float32))


def test_masks(check: Check) -> None:
    fn = partial(resized, size=(9, 5), mode="nearest")
    check(SplitCase(fn, Mesh(height=2, width=2), ((2, 1, 7, 4),), dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, pools: dict[int, RankPool]) -> None:
    pools[2].run(half_precision_agrees, dtype)


def half_precision_agrees(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 7, 4, dtype=dtype)
    split: Any = shard(x, opened(Mesh(height=2)), {2: "height"})
    y: Any = F.interpolate(split, size=(9, 5), mode="bilinear")
    expected = F.interpolate(x.float(), size=(9, 5), mode="bilinear").to(dtype)
    assert y.dtype == dtype
    assert torch.equal(y.gather(), expected)


def training_after_inference() -> None:
    x: Any = shard(torch.randn(1, 1, 7, 2), opened(Mesh(height=2)), {2: "height"})
    with torch.inference_mode():
        resized(x, size=(9, 5), mode="bilinear")
    x.local.requires_grad_()
    resized(x, size=(9, 5), mode="bilinear").local.sum().backward()
    assert x.local.grad is not None


def test_training_after_inference(pools: dict[int, RankPool]) -> None:
    pools[2].run(training_after_inference)


def refusals() -> list[str]:
    mesh = opened(Mesh(height=2))
    image: Any = shard(torch.ones(1, 1, 6, 4), mesh, {2: "height"})
    unsupported: list[tuple[Any, dict[str, Any]]] = [
        (image, {"size": (3, 3), "mode": "bilinear", "antialias": True}),
        (image, {"size": (3, 3), "mode": "trilinear"}),
        (image.long(), {"size": (3, 3), "mode": "bilinear"}),
    ]
    messages = []
    for x, options in unsupported:
        with pytest.raises(UnsupportedError) as caught:
            resized(x, **options)
        messages.append(str(caught.value))
    wrong: list[dict[str, Any]] = [
        {},
        {"size": 3, "scale_factor": 2},
        {"size": (3,)},
        {"size": 3, "align_corners": True},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=r"size|align_corners"):
            resized(image, **options)
    return messages


def test_refusals_say_what_works(pools: dict[int, RankPool]) -> None:
    antialias, mode, dtype = pools[2].run(refusals)[0]
    assert "`antialias` (=True)" in antialias
    assert "antialias=False" in antialias
    assert "`mode` (='trilinear') must be one of nearest, nearest-exact, bilinear, bicubic, area" in mode
    assert "torch.int64" in dtype
