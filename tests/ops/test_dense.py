"""Dense layers over the last dim."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from convmesh import ConvMeshError, Mesh, shard
from convmesh.testing import SplitCase, opened
from convmesh.testing.strategies import extents, spatial_dims
from tests.conftest import Pools
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return F.linear(x, weight, bias)


def linear_module(x: Any, weight: Any, bias: Any) -> Any:
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x)


def product(x: Any, weight: Any, way: str) -> Any:
    if way == "operator":
        return x @ weight
    return torch.matmul(x, weight) if way == "function" else x.matmul(weight)


def classifier(x: Any, first: Any, bias: Any, last: Any) -> Any:
    hidden = torch.relu(F.linear(x.flatten(1), first, bias))
    return F.linear(hidden, last)


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("linear", "nn.Linear, with and without bias, last dim cut or not")
def test_linear(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(st.integers(1, 9)), 2, *data.draw(extents(spatial, largest=7)))
    outputs = data.draw(st.integers(1, 4))
    params: tuple[tuple[int, ...], ...] = ((outputs, shape[-1]), (outputs,))
    fn = data.draw(st.sampled_from([linear, linear_module]))
    if fn is linear and data.draw(st.booleans()):
        params = params[:1]
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    check(SplitCase(fn, mesh, (shape,), params, dtype=dtype))


@on_grids
@given(data=st.data())
@pytest.mark.operator("matmul", "a matrix of weights on the right; x @ w")
def test_matmul(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(st.integers(1, 9)), 2, *data.draw(extents(spatial, largest=7)))
    way = data.draw(st.sampled_from(["operator", "function", "method"]))
    check(SplitCase(partial(product, way=way), mesh, (shape,), ((shape[-1], 3),)))


@on_grids
@given(data=st.data())
def test_classifier_behind_flatten(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(st.integers(1, 9)), 2, *data.draw(extents(spatial, largest=5)))
    features = torch.Size(shape[1:]).numel()
    check(SplitCase(classifier, mesh, (shape,), ((4, features), (4,), (3, 4))))


def test_sharded_weight_is_gathered(check: Check) -> None:
    cuts = ({0: "data"}, {0: "height"})
    check(SplitCase(linear, Mesh(data=2, height=2), ((4, 6), (5, 6)), cuts=cuts))


def _refusals() -> None:
    x: Any = shard(torch.zeros(4, 6), opened(Mesh(height=2)), {1: "height"})
    with pytest.raises(ConvMeshError, match=r"`matmul` on Sharded\(4, 6\), Sharded"):
        x @ x
    with pytest.raises(ValueError, match=r"last dim of the input, Sharded\(4, 6\), must have the 5 elements"):
        F.linear(x, torch.zeros(3, 5))


def test_refusals(pools: Pools) -> None:
    pools[2].run(_refusals)
