"""Pixel and channel shuffles."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from convmesh import Mesh, UnsupportedError, shard
from convmesh.testing import RankPool, SplitCase, opened
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]


def enlarged(x: Any, factor: int) -> Any:
    return nn.PixelShuffle(factor)(x)


def folded(x: Any, factor: int) -> Any:
    return nn.PixelUnshuffle(factor)(x)


def interleaved(x: Any, groups: int) -> Any:
    return nn.ChannelShuffle(groups)(x)


@on_grids
@given(data=st.data())
@pytest.mark.operator("pixel_shuffle", "any factor; cuts through the middle of a pixel")
def test_pixel_shuffle(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    factor = data.draw(st.integers(1, 4))
    height, width = data.draw(extents(2, largest=7))
    shape = (data.draw(batch_sizes(mesh)), 2 * factor**2, height, width)
    check(SplitCase(partial(enlarged, factor=factor), mesh, (shape,), cuts=cuts(mesh)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("pixel_unshuffle", "any factor; shards that hold part of a pixel")
def test_pixel_unshuffle(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    factor = data.draw(st.integers(1, 4))
    height, width = data.draw(extents(2, largest=5))
    shape = (data.draw(batch_sizes(mesh)), 3, factor * height, factor * width)
    check(SplitCase(partial(folded, factor=factor), mesh, (shape,), cuts=cuts(mesh)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("channel_shuffle", "any number of groups")
def test_channel_shuffle(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    groups = data.draw(st.sampled_from([1, 2, 3, 6]))
    shape = (data.draw(batch_sizes(mesh)), 6, *data.draw(extents(data.draw(spatial_dims(mesh)))))
    check(SplitCase(partial(interleaved, groups=groups), mesh, (shape,)))


@pytest.mark.parametrize("fn", [partial(enlarged, factor=2), partial(folded, factor=2), partial(interleaved, groups=4)])
def test_cut_channels(fn: Callable[..., Any], check: Check) -> None:
    check(SplitCase(fn, Mesh(channel=3, width=2), ((2, 12, 4, 6),), cuts=({1: "channel", 3: "width"},)))


def cuts(mesh: Mesh) -> tuple[dict[int, str | tuple[str, ...]]]:
    """Images have no depth; its axis cuts their rows, after `height` if there is one."""
    rows = tuple(name for name in ("height", "depth") if name in mesh.axes)
    whole: dict[int, str | tuple[str, ...]] = {0: "data", 2: rows, 3: "width"}
    return ({dim: axes for dim, axes in whole.items() if axes and (dim == 2 or axes in mesh.axes)},)


def refused() -> None:
    image: Any = shard(torch.ones(1, 3, 6, 5), opened(Mesh(height=2)), {2: "height"})
    with pytest.raises(UnsupportedError, match=r"`upscale_factor` \(=2\) must .* dim -3 must be divisible by 4"):
        enlarged(image, 2)
    with pytest.raises(
        UnsupportedError, match=r"dim -2 must be divisible by 2 and dim -1 must be divisible by 2, but .*6, 5"
    ):
        folded(image, 2)
    with pytest.raises(UnsupportedError, match=r"`groups` \(=2\)"):
        interleaved(image, 2)


def test_refusals_go_by_the_global_shape(pools: dict[int, RankPool]) -> None:
    pools[2].run(refused)
