"""Operators that repeat values, pick them by index, or need all of a dim."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convmesh import Mesh
from convmesh.testing import SplitCase
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.draws import draws

Check = Callable[[SplitCase], None]
MESHES = [Mesh(data=2), Mesh(width=3), Mesh(height=2, width=2)]
on_meshes = pytest.mark.parametrize("mesh", MESHES, ids=str)


def called(x: Any, name: str, args: tuple[Any, ...]) -> Any:
    return getattr(x, name)(*args)


def picked(x: Any, dim: int, index: list[int]) -> Any:
    return torch.index_select(x, dim, torch.tensor(index))


def gathered(x: Any, y: Any, dim: int) -> Any:
    return torch.gather(x, dim, (y > 0).long())


def draw_shape(data: st.DataObject, mesh: Mesh) -> tuple[int, ...]:
    return (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(data.draw(spatial_dims(mesh)), largest=7)))


@on_meshes
@given(data=st.data())
@draws(10)
@pytest.mark.operator("repeat, repeat_interleave, expand", "any dims, new ones too")
def test_repeats(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    times = tuple(data.draw(st.integers(1, 3)) for _ in range(len(shape) + data.draw(st.integers(0, 1))))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    calls = [("repeat", times), ("repeat_interleave", (times[0], dim)), ("expand", (2, *shape))]
    name, args = data.draw(st.sampled_from(calls))
    check(SplitCase(partial(called, name=name, args=args), mesh, (shape,)))


@on_meshes
@given(data=st.data())
@draws(10)
@pytest.mark.operator("cumsum, cumprod, sort, topk", "any dim")
def test_along_a_dim(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    calls = [("cumsum", (dim,)), ("cumprod", (dim,)), ("sort", (dim,)), ("topk", (1, dim)), ("unfold", (dim, 1, 2))]
    name, args = data.draw(st.sampled_from(calls))
    check(SplitCase(partial(called, name=name, args=args), mesh, (shape,)))


@on_meshes
@given(data=st.data())
@draws(10)
@pytest.mark.operator("index_select, gather", "any dim; indices twice and out of order")
def test_picks(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    index = data.draw(st.lists(st.integers(0, shape[dim] - 1), min_size=1, max_size=9))
    check(SplitCase(partial(picked, dim=dim, index=index), mesh, (shape,)))
    if shape[dim] > 1:
        check(SplitCase(partial(gathered, dim=dim), mesh, (shape, shape)))
