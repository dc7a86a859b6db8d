"""Max unpooling: indices returned by max pooling, and any others."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.testing import SplitCase
from tests.draws import draws
from tests.ops.grids import on_grids
from tests.ops.test_pools import Options, draw_windows, pool, shape_of

Check = Callable[[SplitCase], None]


def pool_and_unpool(x: Any, y: Any, dims: int, options: Options, full_size: bool, functional: bool) -> Any:
    """Unpool values other than those pooled, so that a duplicate index matters."""
    pooled, indices = pool(x, "Max", dims, {**options, "return_indices": True}, functional)
    size = x.shape[2:] if full_size else None
    kept = {key: value for key, value in options.items() if key in ("kernel_size", "stride", "padding")}
    if functional:
        return getattr(F, f"max_unpool{dims}d")(pooled * y, indices, **kept, output_size=size)
    return getattr(nn, f"MaxUnpool{dims}d")(**kept)(pooled * y, indices, output_size=size)


def unpool_anywhere(x: Any, indices: Any, dims: int) -> Any:
    """Indices that no pooling could return."""
    return getattr(F, f"max_unpool{dims}d")(x, indices, 2)


def default_sizes(spatial: tuple[int, ...], options: Options) -> tuple[int, ...]:
    """The output extents of unpooling without an `output_size`."""
    dims = len(spatial)
    pooled = getattr(F, f"max_pool{dims}d")(torch.empty(1, 1, *spatial), **options).shape[2:]
    each = zip(pooled, strides(options), options["kernel_size"], options["padding"], strict=True)
    return tuple((out - 1) * s + k - 2 * p for out, s, k, p in each)


def strides(options: Options) -> tuple[int, ...]:
    stride = options["stride"] or options["kernel_size"]
    return (stride,) * len(options["kernel_size"]) if isinstance(stride, int) else stride


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator("max_unpool", "1D–3D; kernel, stride, padding, output_size; overlapping and dilated windows")
def test_max_unpool(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shape_of(mesh, data, smallest=2, largest=10)
    dims = len(shape) - 2
    options = draw_windows(data, shape[2:], dilated=True)
    full_size = data.draw(st.booleans(), "full size")
    defaults = default_sizes(shape[2:], options)
    if not full_size or any(abs(n - m) >= s for n, m, s in zip(shape[2:], defaults, strides(options), strict=True)):
        options["dilation"] = 1  # torch accepts only output sizes within a stride of the default
        defaults = default_sizes(shape[2:], options)
    full_size |= min(defaults) < 1
    shape = shape if full_size else (*shape[:2], *defaults)
    pooled = getattr(F, f"max_pool{dims}d")(torch.empty(shape), **options).shape
    fn = partial(pool_and_unpool, dims=dims, options=options, full_size=full_size, functional=data.draw(st.booleans()))
    check(SplitCase(fn, mesh, (shape, tuple(pooled))))


@on_grids
@given(data=st.data())
@pytest.mark.operator("max_unpool", "indices that lie anywhere in the output")
def test_max_unpool_with_stray_indices(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shape_of(mesh, data, largest=6)
    dims = len(shape) - 2
    classes = math.prod(2 * n for n in shape[2:])
    fn = partial(unpool_anywhere, dims=dims)
    check(SplitCase(fn, mesh, (shape, shape), integer_inputs=frozenset({1}), classes=classes))


class Undone(nn.Module):
    """Pooled and unpooled, as SegNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, places = self.pool(self.conv(x))
        made: torch.Tensor = self.unpool(values * 2, places)
        return made


def test_networks_that_unpool_are_exact_under_a_plan() -> None:
    model = Undone()
    verified = cm.verify(model, (1, 2, 8, 8), cm.plan(model, (1, 2, 8, 8), Mesh(height=2), "spatial"), steps=1)
    assert verified.ok, str(verified)
