"""Adding, removing and reordering dims."""

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
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]


def called(x: Any, name: str, method: bool, args: tuple[Any, ...]) -> Any:
    return getattr(x, name)(*args) if method else getattr(torch, name)(x, *args)


def draw_shape(data: st.DataObject, mesh: Mesh, largest: int = 12) -> tuple[int, ...]:
    return (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(data.draw(spatial_dims(mesh)), largest=largest)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("permute, transpose, swapaxes, swapdims, movedim, moveaxis", "functions and methods")
def test_reordering(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    names = ["permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis"]
    name = data.draw(st.sampled_from(names))
    dim = st.integers(-len(shape), len(shape) - 1)
    order = st.tuples(st.permutations(range(len(shape))))
    args = data.draw(order if name == "permute" else st.tuples(dim, dim))
    check(SplitCase(partial(called, name=name, method=data.draw(st.booleans()), args=args), mesh, (shape,)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("squeeze", "all dims, one, several; cut dims too")
def test_squeeze(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh, largest=2)
    dims = st.integers(-len(shape), len(shape) - 1)
    args = data.draw(st.one_of(st.just(()), st.tuples(dims), st.tuples(st.just((0, 2)))))
    check(SplitCase(partial(called, name="squeeze", method=data.draw(st.booleans()), args=args), mesh, (shape,)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("unsqueeze", "any place")
def test_unsqueeze(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    args = (data.draw(st.integers(-len(shape) - 1, len(shape))),)
    check(SplitCase(partial(called, name="unsqueeze", method=data.draw(st.booleans()), args=args), mesh, (shape,)))
