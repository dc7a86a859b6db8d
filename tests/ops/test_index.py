"""Slices, integer indices, narrow, select, flip and roll."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from convmesh import Mesh, UnsupportedError, shard
from convmesh.testing import RankPool, SplitCase, opened
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]


def indexed(x: Any, index: Any) -> Any:
    return x[index]


def called(x: Any, name: str, method: bool, args: tuple[Any, ...]) -> Any:
    return getattr(x, name)(*args) if method else getattr(torch, name)(x, *args)


def draw_shape(data: st.DataObject, mesh: Mesh, largest: int = 12) -> tuple[int, ...]:
    return (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(data.draw(spatial_dims(mesh)), largest=largest)))


def slices(extent: int) -> st.SearchStrategy[slice]:
    ends = st.one_of(st.none(), st.integers(-extent - 1, extent + 1))
    return st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, 3, 5]))


def picks(extent: int) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(slice(None)), slices(extent), slices(extent), st.integers(-extent, extent - 1))


@on_grids
@given(data=st.data())
@draws(25)
@pytest.mark.operator("indexing", "slices with steps, whole numbers, None, ...")
def test_indexing(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    index = [data.draw(picks(extent)) for extent in shape[: data.draw(st.integers(0, len(shape)))]]
    if len(index) < len(shape) or data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), ...)
        index = trailing(index, shape, data)
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), None)
    check(SplitCase(partial(indexed, index=tuple(index)), mesh, (shape,)))


def trailing(index: list[Any], shape: tuple[int, ...], data: st.DataObject) -> list[Any]:
    """Picks after `...` count from the last dim, so they are drawn again to fit there."""
    before, after = index[: index.index(...)], index[index.index(...) + 1 :]
    last = shape[len(shape) - len(after) :]
    return [*before, ..., *(data.draw(picks(extent)) for extent in last)]


@on_grids
@given(data=st.data())
@pytest.mark.operator("narrow, select", "functions and methods")
def test_narrow_and_select(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    start = data.draw(st.integers(-shape[dim], shape[dim] - 1))
    length = data.draw(st.integers(0, shape[dim] - start % shape[dim]))
    method = data.draw(st.booleans())
    name, args = data.draw(st.sampled_from([("narrow", (dim, start, length)), ("select", (dim, start))]))
    check(SplitCase(partial(called, name=name, method=method, args=args), mesh, (shape,)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("flip", "any dims")
def test_flip(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    dims = tuple(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    method = data.draw(st.booleans())
    args = dims if dims and method else (dims,)
    check(SplitCase(partial(called, name="flip", method=method, args=args), mesh, (shape,)))


@on_grids
@given(data=st.data())
@draws(12)
@pytest.mark.operator("roll", "any dims, any shifts")
def test_roll(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    dims = tuple(data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), min_size=1, max_size=3)))
    shifts = tuple(data.draw(st.integers(-15, 15)) for _ in dims)
    args: tuple[Any, ...] = (shifts[0], dims[0]) if len(dims) == 1 else (shifts, dims)
    check(SplitCase(partial(called, name="roll", method=data.draw(st.booleans()), args=args), mesh, (shape,)))


@given(data=st.data())
def test_indexing_of_replicated_and_doubly_cut_tensors(data: st.DataObject, check: Check) -> None:
    shape = (2, 3, *data.draw(extents(2)))
    index = (slice(None), slice(None), *(data.draw(picks(extent)) for extent in shape[2:]))
    assume(index != (slice(None),) * 4)
    cuts: list[dict[int, str | tuple[str, ...]]] = [
        {},
        {3: "height"},
        {2: ("width", "height")},
        {2: "width", 3: "height"},
    ]
    cut = data.draw(st.sampled_from(cuts))
    check(SplitCase(partial(indexed, index=index), Mesh(height=2, width=2), (shape,), cuts=(cut,)))


def set_parts(x: Any, y: Any) -> Any:
    z = x * 1
    z[:, 1:, ..., 2] = 3.0
    z[:, 0] = y[:, 1]
    z[0] += y[:1, :1, ..., :1][0]
    return z


@on_grids
@given(data=st.data())
@pytest.mark.operator("setting items", "slices and whole numbers; numbers and tensors that broadcast")
def test_setting_items(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    dims = data.draw(spatial_dims(mesh))
    shape = (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(dims, smallest=3, largest=7)))
    check(SplitCase(set_parts, mesh, (shape, shape)))


@given(data=st.data())
@draws(12)
@pytest.mark.operator("indexing by a list", "of any dim; negative numbers; a tensor of several dims")
def test_indexing_by_lists(data: st.DataObject, check: Check) -> None:
    mesh = Mesh(height=2, width=2)
    place = data.draw(st.integers(0, 3))
    numbers = data.draw(st.sampled_from([[0, 1, -1], torch.tensor([[1, 0], [0, -2]]), torch.tensor([2])]))
    index = (*[slice(None)] * place, numbers)
    behind = (..., numbers, *[slice(1, None)] * (3 - place))
    check(SplitCase(partial(indexed, index=data.draw(st.sampled_from([index, behind]))), mesh, ((3, 3, 5, 4),)))


def iterates_and_takes_numpy_numbers() -> None:
    whole = torch.arange(12.0).view(3, 4)
    x: Any = shard(whole, opened(Mesh(height=2)), {0: "height"})
    assert [row.gather().tolist() for row in x] == whole.tolist()
    assert x[np.int64(1), 2].item() == 6.0
    assert x[...] is x


def test_iteration(pools: dict[int, RankPool]) -> None:
    pools[2].run(iterates_and_takes_numpy_numbers)


def refused() -> None:
    x: Any = shard(torch.ones(4, 6), opened(Mesh(height=2)), {0: "height"})
    for index in (True, [True], torch.ones(4, 6, dtype=torch.bool), x > 0, (0, torch.tensor(1))):
        with pytest.raises(UnsupportedError, match="takes integers, slices, None"):
            x[index]
    with pytest.raises(UnsupportedError, match=r"step -1 in dim 1.*torch\.flip"):
        x[:, ::-1]
    for wrong in (4, -5, (0, 6), (0, 0, 0), (..., ...)):
        with pytest.raises(IndexError, match="`index`"):
            x[wrong]
    with pytest.raises(IndexError, match=r"`start` \(=3\) and `length` \(=2\) must lie in dim 0 of extent 4"):
        x.narrow(0, 3, 2)
    with pytest.raises(IndexError, match=r"`dim` \(=2\) must be from -2 to 1"):
        x.select(2, 0)
    with pytest.raises(UnsupportedError, match=r"`dims` \(=None\) must name a dim for each of `shifts`"):
        x.roll(1)


def test_refusals(pools: dict[int, RankPool]) -> None:
    pools[2].run(refused)
