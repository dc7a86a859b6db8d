"""Flatten, reshape, view and unflatten."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from convmesh import Layout, Mesh, UnsupportedError, shard
from convmesh.layout import Cut, Partition
from convmesh.ops.shape.reshape import match_dims, reshaped_layouts
from convmesh.testing import SplitCase, opened
from convmesh.testing.strategies import extents, spatial_dims
from tests.conftest import Pools
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]
Shape = tuple[int, ...]

WAYS = ("module", "flatten", "method", "view", "reshape", "from 2", "first two", "all", "last two", "as")


def flattened(x: Any, way: str) -> Any:
    ways: dict[str, Callable[[], Any]] = {
        "module": lambda: nn.Flatten()(x),
        "flatten": lambda: torch.flatten(x, 1, -1),
        "method": lambda: x.flatten(start_dim=1),
        "view": lambda: x.contiguous().view(x.size(0), -1),
        "reshape": lambda: torch.reshape(x, (x.shape[0], -1)),
        "from 2": lambda: x.flatten(2),
        "first two": lambda: x.flatten(0, 1),
        "all": lambda: x.reshape(-1),
        "last two": lambda: torch.flatten(x, -2),
        "as": lambda: x.reshape_as(torch.empty(x.shape[0], x.numel() // x.shape[0])),
    }
    return ways[way]()


def reshaped(x: Any, shape: Shape) -> Any:
    return x.reshape(shape) * 2


def unflattened(x: Any, dim: int, sizes: Shape, way: str) -> Any:
    ways: dict[str, Callable[[], Any]] = {
        "module": lambda: nn.Unflatten(dim, sizes)(x),
        "method": lambda: x.unflatten(dim, sizes),
        "function": lambda: torch.unflatten(x, dim, sizes),
    }
    return ways[way]()


@st.composite
def shapes_of(draw: st.DrawFn, elements: int) -> Shape:
    """Any shape with this many elements, including dims of extent 1."""
    shape = []
    for _ in range(draw(st.integers(0, 4))):
        shape.append(draw(st.sampled_from([n for n in range(1, elements + 1) if elements % n == 0])))
        elements //= shape[-1]
    return (*shape, elements)


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator("flatten, view", "nn.Flatten, any range of dims, x.view(x.size(0), -1)")
def test_flatten(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3)), *data.draw(extents(spatial, largest=7)))
    channels_last = data.draw(st.booleans()) and spatial > 1
    memory = {2: torch.channels_last, 3: torch.channels_last_3d}[spatial] if channels_last else torch.contiguous_format
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    way = data.draw(st.sampled_from(WAYS))
    check(SplitCase(partial(flattened, way=way), mesh, (shape,), dtype=dtype, memory_format=memory))


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator("reshape", "any shape: merged, split and regrouped dims")
def test_reshape(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 2)), *data.draw(extents(spatial, largest=6)))
    wanted = data.draw(shapes_of(torch.Size(shape).numel()))
    check(SplitCase(partial(reshaped, shape=wanted), mesh, (shape,)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("unflatten", "nn.Unflatten, any dim")
def test_unflatten(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    dim = data.draw(st.integers(0, 1 + spatial))
    sizes = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    shape = [data.draw(st.integers(1, 9)), 2, *data.draw(extents(spatial, largest=7))]
    shape[dim] = sizes[0] * sizes[1]
    way = data.draw(st.sampled_from(["method", "function", "module"] if dim else ["method", "function"]))
    check(SplitCase(partial(unflattened, dim=dim, sizes=sizes, way=way), mesh, (tuple(shape),)))


@given(data=st.data())
def test_shards_keep_their_elements(data: st.DataObject) -> None:
    """On every rank, the input box that the rule requires and the output box hold the same elements in order."""
    mesh = Mesh(data=2, depth=2, width=3)
    shape = data.draw(st.tuples(*[st.integers(1, 6)] * 4))
    axes = data.draw(st.permutations(["data", "depth", "width"]))
    layout = Layout.of(mesh, shape, dict(zip(data.draw(st.permutations(range(4))), axes, strict=False)))
    before, after = reshaped_layouts(layout, data.draw(shapes_of(torch.Size(shape).numel())))
    whole = torch.arange(torch.Size(shape).numel())
    for rank in range(mesh.size):
        held, produced = (whole.view(at.shape)[at.box(rank).slices()].flatten() for at in (before, after))
        assert torch.equal(held, produced)


def cut_of(layout: Layout) -> dict[int, tuple[str, ...]]:
    return {dim: cut.axes for dim, cut in enumerate(layout.cuts) if cut.axes}


SPATIAL = Mesh(data=2, depth=2, height=2)


@pytest.mark.parametrize(
    ("shape", "cut", "wanted", "found"),
    [
        ((2, 3, 4, 4), {0: "data", 2: "depth"}, (2, 3, 16), {0: ("data",), 2: ("depth",)}),
        ((2, 3, 4, 4), {0: "data", 2: "depth"}, (6, 4, 4), {0: ("data",), 1: ("depth",)}),
        ((2, 3, 4, 4), {0: "data", 2: "depth", 3: "height"}, (2, 3, 16), {0: ("data",), 2: ("depth",)}),
        ((8, 3, 4, 4), {0: "data", 2: "depth", 3: "height"}, (8, 48), {0: ("data", "depth", "height")}),
        ((7, 3, 4, 4), {0: "data", 2: "depth", 3: "height"}, (7, 48), {0: ("data",)}),
        ((4, 3, 4, 4), {2: "depth", 3: "height"}, (4, 48), {0: ("depth", "height")}),
        ((8, 3, 4), {0: "data", 2: "depth"}, (96,), {0: ("data", "depth")}),
        ((8, 6), {0: "data", 1: "depth"}, (8, 2, 3), {0: ("data",), 1: ("depth",)}),
        ((8, 6), {0: "data", 1: "depth"}, (8, 3, 2), {0: ("data", "depth")}),
        ((3, 6), {0: "data", 1: "depth"}, (3, 3, 2), {0: ("data",)}),
        ((2, 3, 4), {0: "data", 2: "depth"}, (1, 2, 3, 4, 1), {1: ("data",), 3: ("depth",)}),
        ((1, 3, 4), {0: "data", 2: "depth"}, (3, 4), {1: ("depth",)}),
        ((6, 4), {0: "data"}, (4, 6), {0: ("data",)}),
        ((3, 4), {0: "data"}, (4, 3), {}),
    ],
)
def test_layout_rule(shape: Shape, cut: dict[int, str], wanted: Shape, found: dict[int, tuple[str, ...]]) -> None:
    assert cut_of(reshaped_layouts(Layout.of(SPATIAL, shape, cut), wanted)[1]) == found


def test_an_uneven_cut_is_kept_if_its_bounds_allow() -> None:
    uneven = Layout(Mesh(depth=2), [Cut(("depth",), Partition([0, 2, 6])), Cut((), Partition([0, 3]))])
    assert reshaped_layouts(uneven, (18,))[1].cuts == (Cut(("depth",), Partition([0, 6, 18])),)
    assert reshaped_layouts(uneven, (9, 2))[1].cuts[0] == Cut(("depth",), Partition([0, 3, 9]))
    assert cut_of(reshaped_layouts(uneven, (2, 9))[1]) == {}


def test_groups_are_the_smallest() -> None:
    assert match_dims((2, 3, 4, 4), (2, 12, 2, 2)) == [((0,), (0,)), ((1, 2), (1,)), ((3,), (2, 3)), ((), ())]
    assert match_dims((2, 1, 1), (2,)) == [((0,), (0,)), ((1, 2), ())]


def _refusals() -> None:
    x = shard(torch.zeros(4, 6), opened(Mesh(height=2)), {1: "height"})
    with pytest.raises(UnsupportedError, match=r"`dtype` \(=torch.int32\): a split view changes only the shape"):
        x.float().view(torch.int32)
    with pytest.raises(RuntimeError, match=r"shape '\[5, -1\]' is invalid for input of size 24"):
        x.view(5, -1)
    assert x.reshape(4, 6) is x


def test_refusals(pools: Pools) -> None:
    pools[2].run(_refusals)


def _without_elements() -> None:
    x = shard(torch.zeros(4, 0, 6), opened(Mesh(height=2)), {0: "height"})
    assert [tuple(x.reshape(s).shape) for s in ((0,), (3, 0), (0, 5))] == [(0,), (3, 0), (0, 5)]


def test_tensors_without_elements(pools: Pools) -> None:
    pools[2].run(_without_elements)
