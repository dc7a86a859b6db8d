"""Adaptive and global pooling."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from convmesh import Mesh, UnsupportedError, shard
from convmesh.testing import SplitCase, natural_cut, opened
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.conftest import Pools
from tests.draws import draws
from tests.ops.grids import on_grids
from tests.ops.test_pools import FORMATS, with_odd_values, with_ties

Check = Callable[[SplitCase], None]
Sizes = int | tuple[int | None, ...]


def average(x: Any, dims: int, sizes: Sizes, functional: bool) -> Any:
    if functional:
        return getattr(F, f"adaptive_avg_pool{dims}d")(x, sizes)
    return getattr(nn, f"AdaptiveAvgPool{dims}d")(sizes)(x)


def maximum(x: Any, dims: int, sizes: Sizes, functional: bool, return_indices: bool) -> Any:
    x = with_ties(x)
    if functional:
        return getattr(F, f"adaptive_max_pool{dims}d")(x, sizes, return_indices=return_indices)
    return getattr(nn, f"AdaptiveMaxPool{dims}d")(sizes, return_indices=return_indices)(x)


def odd_maximum(x: Any, share: float, dims: int, sizes: Sizes) -> Any:
    return getattr(F, f"adaptive_max_pool{dims}d")(with_odd_values(x, share), sizes, return_indices=True)


def shape_of(mesh: Mesh, data: st.DataObject) -> tuple[int, ...]:
    dims = data.draw(spatial_dims(mesh), "dims")
    return (data.draw(batch_sizes(mesh)), 2, *data.draw(extents(dims), "extents"))


def sizes_of(dims: int) -> st.SearchStrategy[Any]:
    """Output sizes: global often, above and below the input's extents, the input's own, and one number for all dims."""
    each = st.one_of(st.just(1), st.integers(1, 9), st.none()) if dims > 1 else st.integers(1, 9)
    return st.one_of(st.integers(1, 9), st.just(1), st.tuples(*[each] * dims))


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator("adaptive_avg_pool", "1D–3D; any output size, None, global pooling")
def test_adaptive_avg_pool(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shape_of(mesh, data)
    dims = len(shape) - 2
    fn = partial(average, dims=dims, sizes=data.draw(sizes_of(dims), "sizes"), functional=data.draw(st.booleans()))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    memory_format = data.draw(st.sampled_from([torch.contiguous_format, FORMATS.get(dims, torch.contiguous_format)]))
    check(SplitCase(fn, mesh, (shape,), dtype=dtype, memory_format=memory_format))


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator("adaptive_max_pool", "1D–3D; any output size, None, global pooling, return_indices")
def test_adaptive_max_pool(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shape_of(mesh, data)
    dims = len(shape) - 2
    sizes = data.draw(sizes_of(dims), "sizes")
    flags = {"functional": data.draw(st.booleans()), "return_indices": data.draw(st.booleans())}
    memory_format = data.draw(st.sampled_from([torch.contiguous_format, FORMATS.get(dims, torch.contiguous_format)]))
    check(SplitCase(partial(maximum, dims=dims, sizes=sizes, **flags), mesh, (shape,), memory_format=memory_format))


@on_grids
@given(data=st.data())
@pytest.mark.operator("adaptive_max_pool", "-inf throughout, and NaN")
def test_adaptive_max_pool_of_odd_values(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shape_of(mesh, data)
    dims = len(shape) - 2
    sizes = data.draw(sizes_of(dims), "sizes")
    share = data.draw(st.sampled_from([0.8, 3.0, -0.8]))
    check(SplitCase(partial(odd_maximum, share=share, dims=dims, sizes=sizes), mesh, (shape,)))


def direct_forms(x: Any) -> Any:
    """Functions that always return indices."""
    return [
        *torch.adaptive_max_pool1d(x, 3),
        *F.adaptive_max_pool1d_with_indices(x, (1,)),
        F.adaptive_avg_pool1d(x, [2]),
    ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_forms_of_calling(ranks: int, check: Check) -> None:
    check(SplitCase(direct_forms, Mesh(width=ranks), ((2, 3, 7),)))
    check(SplitCase(direct_forms, Mesh(width=ranks), ((3, 7),), cuts=({1: "width"},)))


def global_pooling(mesh: Mesh, dtype: torch.dtype) -> tuple[list[str], list[float]]:
    """Carriers used, and the largest errors of average and maximum, of pooling a volume to one value per channel."""
    whole = torch.randn(2, 4, 6, 6, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    x: Any = shard(whole, opened(mesh), natural_cut(mesh, 5))
    with opened(mesh).traffic.watch() as traffic:
        results: list[Any] = [F.adaptive_avg_pool3d(x, 1), F.adaptive_max_pool3d(x, 1)]
    assert all(result.layout.axes == x.layout.axes_of([0, 1]) for result in results)
    expected = [whole.float().mean((2, 3, 4), keepdim=True), whole.amax((2, 3, 4), keepdim=True)]
    errors = [(r.local - e[r.box.slices()]).abs().max().item() for r, e in zip(results, expected, strict=True)]
    return list(traffic.bytes_sent), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_global_pooling_gathers_nothing(dtype: torch.dtype, pools: Pools) -> None:
    for carriers, (average_error, maximum_error) in pools[4].run(global_pooling, Mesh(data=2, depth=2), dtype):
        assert carriers == ["all_reduce"]
        assert average_error < torch.finfo(dtype).eps
        assert maximum_error == 0


def refusal(mesh: Mesh, name: str, dtype: torch.dtype, size: Any) -> str:
    x = shard(torch.ones(1, 1, 4, 4, dtype=dtype), opened(mesh), natural_cut(mesh, 4))
    with pytest.raises((UnsupportedError, RuntimeError, ValueError)) as refused:
        getattr(F, name)(x, size)
    return str(refused.value)


@pytest.mark.parametrize("name", ["adaptive_avg_pool2d", "adaptive_max_pool2d"])
def test_refused(name: str, pools: Pools) -> None:
    mesh = Mesh(height=2)
    integers = f"`input` (of torch.int64) must be floating point for `{name}`."
    assert pools[2].run(refusal, mesh, name, torch.int64, 1) == [integers] * 2
    messages = pools[2].run(refusal, mesh, name, torch.float32, (1, 2, 3))
    assert all("output_size" in text for text in messages), messages
