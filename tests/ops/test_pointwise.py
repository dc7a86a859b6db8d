"""Activations, arithmetic and broadcasting."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convmesh import Mesh
from convmesh.testing import SplitCase
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]

ACTIVATIONS = ("relu", "leaky_relu", "elu", "gelu", "silu", "softplus", "hardswish", "sigmoid", "tanh", "mish")


def activation(x: Any, name: str) -> Any:
    return getattr(F, name)(x)


def arithmetic(a: Any, b: Any, c: Any) -> Any:
    return (a + b) * a - c / (1 + b * b) + 2 ** torch.tanh(a)


@on_grids
@given(data=st.data())
@pytest.mark.operator("activations", "relu, gelu, elu, silu, … (40 functions)")
def test_activations(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(spatial)))
    name = data.draw(st.sampled_from(ACTIVATIONS))
    check(SplitCase(partial(activation, name=name), mesh, (shape,), dtype=torch.float64))


@on_grids
@given(data=st.data())
@pytest.mark.operator("add, mul, … with broadcasting", "numbers, shards and plain tensors, in any order")
def test_broadcasting(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    shape = (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(spatial)))
    thin = tuple(n if data.draw(st.booleans()) else 1 for n in shape)
    param = (3, *shape[2:]) if data.draw(st.booleans()) else (3, *[1] * spatial)
    check(SplitCase(arithmetic, mesh, (shape, thin), (param,)))


def cropped_in_place(x: Any) -> Any:
    cropped = x[:, :, 1:] * 1 if isinstance(x, torch.Tensor) else x[:, :, 1:]
    result = F.relu(cropped, inplace=True)
    return result + cropped


@on_grids
def test_in_place_activation_of_a_view(mesh: Mesh, check: Check) -> None:
    check(SplitCase(cropped_in_place, mesh, ((2, 2, 5, 6, 4),)))
