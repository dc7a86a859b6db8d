"""Max, average and power-average pooling."""

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

from convmesh import Mesh, UnsupportedError, shard
from convmesh.ops.pool.fused_pool import Windows, fused_max
from convmesh.testing import SplitCase, natural_cut, opened
from convmesh.testing.strategies import batch_sizes, extents, layouts, spatial_dims
from tests.conftest import Pools
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]
Options = dict[str, Any]

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


def pool(x: Any, kind: str, dims: int, options: Options, functional: bool) -> Any:
    """A pooling as a function or as a module."""
    if functional:
        name = {"Max": "max_pool", "Avg": "avg_pool", "LP": "lp_pool"}[kind]
        return getattr(F, f"{name}{dims}d")(x, **options)
    return getattr(nn, f"{kind}Pool{dims}d")(**options)(x)


def with_ties(x: Any) -> Any:
    """Values rounded to integers, with gradients, so that windows have several largest values."""
    return x - x.detach() + torch.round(x.detach())


def with_odd_values(x: Any, share: float) -> Any:
    """Most values -inf or, for a negative share, many NaN; with gradients."""
    if share < 0:
        return torch.where(x.detach() < share, x + math.nan, x)
    return torch.where(x.detach() < share, x - math.inf, x)


def tied_max_pool(x: Any, **options: Any) -> Any:
    return pool(with_ties(x), "Max", **options)


def odd_max_pool(x: Any, share: float, **options: Any) -> Any:
    return pool(with_odd_values(x, share), "Max", **options)


def shape_of(mesh: Mesh, data: st.DataObject, **bounds: int) -> tuple[int, ...]:
    dims = data.draw(spatial_dims(mesh), "dims")
    return (data.draw(batch_sizes(mesh)), 2, *data.draw(extents(dims, **bounds), "extents"))


def per_dim(dims: int, values: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    return st.one_of(values, st.tuples(*[values] * dims))


def draw_windows(
    data: st.DataObject, spatial: tuple[int, ...], dilated: bool = False, fitting: bool = False
) -> Options:
    """Window options that torch accepts: kernels fit, padding is at most half a kernel, every window has an index."""
    dims = len(spatial)
    ceil = data.draw(st.booleans(), "ceil")
    kernel, padding, dilation = [], [], []
    for extent in spatial:
        kernel.append(data.draw(st.integers(1, min(5, extent + (not fitting))), "kernel"))
        padding.append(data.draw(st.integers(0, kernel[-1] // 2), "padding"))
        room = (extent + 2 * padding[-1] - 1) // max(1, kernel[-1] - 1)
        most = min(3, room, extent) if dilated else 1
        dilation.append(data.draw(st.integers(1, max(1, most)), "dilation"))
        if dilation[-1] * (kernel[-1] - 1) + 1 > extent + 2 * padding[-1]:
            kernel[-1], padding[-1], dilation[-1] = extent, 0, 1
    stride = data.draw(st.one_of(st.none(), per_dim(dims, st.integers(1, 4))), "stride")
    options = {"kernel_size": tuple(kernel), "stride": stride, "padding": tuple(padding), "ceil_mode": ceil}
    return {**options, "dilation": tuple(dilation)} if dilated else options


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator(
    "max_pool", "1D–3D; kernel, stride, padding, dilation, ceil_mode, return_indices; any memory format"
)
def test_max_pool(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shape_of(mesh, data)
    dims = len(shape) - 2
    options = draw_windows(data, shape[2:], dilated=True) | {"return_indices": data.draw(st.booleans())}
    fn = partial(tied_max_pool, dims=dims, options=options, functional=data.draw(st.booleans()))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    memory_format = data.draw(st.sampled_from([torch.contiguous_format, FORMATS.get(dims, torch.contiguous_format)]))
    check(SplitCase(fn, mesh, (shape,), dtype=dtype, memory_format=memory_format))


@on_grids
@given(data=st.data())
@pytest.mark.operator("max_pool", "windows of -inf throughout, and NaN")
def test_max_pool_of_infinities(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shape_of(mesh, data)
    options = draw_windows(data, shape[2:]) | {"return_indices": True}
    share = data.draw(st.sampled_from([0.8, 2.0, -0.8]))
    check(
        SplitCase(
            partial(odd_max_pool, share=share, dims=len(shape) - 2, options=options, functional=True), mesh, (shape,)
        )
    )


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator("avg_pool", "1D–3D; kernel, stride, padding, ceil_mode, count_include_pad, divisor_override")
def test_avg_pool(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shape_of(mesh, data)
    dims = len(shape) - 2
    options = draw_windows(data, shape[2:], fitting=dims == 3) | {"count_include_pad": data.draw(st.booleans())}
    if dims > 1:
        options["divisor_override"] = data.draw(st.sampled_from([None, None, 3]))
    fn = partial(pool, kind="Avg", dims=dims, options=options, functional=data.draw(st.booleans()))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    memory_format = data.draw(st.sampled_from([torch.contiguous_format, FORMATS.get(dims, torch.contiguous_format)]))
    check(SplitCase(fn, mesh, (shape,), dtype=dtype, memory_format=memory_format))


@on_grids
@given(data=st.data())
@pytest.mark.operator("lp_pool", "1D–3D; any finite norm_type, kernel, stride, ceil_mode")
def test_lp_pool(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shape_of(mesh, data)
    dims = len(shape) - 2
    options = draw_windows(data, shape[2:], fitting=True)
    del options["padding"]
    if dims == 1:
        options["kernel_size"] = options["kernel_size"][0]
    options["norm_type"] = data.draw(st.sampled_from([1, 2, 3, 4.0]))
    check(
        SplitCase(
            partial(pool, kind="LP", dims=dims, options=options, functional=data.draw(st.booleans())), mesh, (shape,)
        )
    )


def direct_forms(x: Any) -> Any:
    """The functions behind `F.max_pool1d`, called directly; also with an unbatched input."""
    return [
        torch.max_pool1d(x, 3, 2, 1),
        *F.max_pool1d_with_indices(x, (2,)),
        *torch.max_pool1d_with_indices(x, (2,), (1,)),
        F.avg_pool1d(x, 3),
        F.avg_pool1d(input=x, kernel_size=(2,)),
    ]


@on_grids
def test_forms_of_calling(mesh: Mesh, check: Check) -> None:
    if set(mesh.axes) <= {"data", "width"}:
        check(SplitCase(direct_forms, mesh, ((3, 2, 9),)))
        check(SplitCase(direct_forms, mesh, ((3, 9),), cuts=({1: "width"},)))


def several(x: Any) -> Any:
    """Poolings whose windows cross the borders of shards."""
    pooled, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    unpooled = F.max_unpool2d(pooled, indices, (3, 3), (2, 2), (1, 1), x.shape[2:])
    averages = F.avg_pool2d(x, (2, 3), 1, 1), F.adaptive_avg_pool2d(x, (3, 1)), F.adaptive_max_pool2d(x, (1, 3))
    return [pooled, indices, unpooled, *averages]


@on_grids
@given(data=st.data())
@pytest.mark.operator("all poolings", "any layout: channels cut, uneven and empty parts, several axes on a dim")
def test_any_layout(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = (2, 3, *data.draw(extents(2, smallest=2, largest=9)))
    cuts = (data.draw(layouts(mesh, shape)),)
    check(SplitCase(several, mesh, (shape,), cuts=cuts))  # type: ignore[arg-type]


@on_grids
def test_integers_have_maxima(mesh: Mesh, check: Check) -> None:
    options = {"kernel_size": 3, "stride": 2, "padding": 1, "return_indices": True}
    fn = partial(pool, kind="Max", dims=3, options=options, functional=True)
    check(SplitCase(fn, mesh, ((3, 2, 5, 4, 7),), integer_inputs=frozenset({0}), classes=9))


def sent_by_aligned_windows(mesh: Mesh) -> tuple[int, bool]:
    """Bytes sent by pooling windows within the shards, and whether the input's memory was used without a copy."""
    opened_mesh = opened(mesh)
    local = shard(torch.randn(2, 3, 8, 8), opened_mesh, natural_cut(mesh, 4))
    pointers = []
    hook = torch.autograd.graph.saved_tensors_hooks(lambda t: pointers.append(t.data_ptr()) or t, lambda t: t)  # type: ignore[func-returns-value]
    leaf: Any = local.like(local.local.requires_grad_())
    with opened_mesh.traffic.watch() as traffic, hook:
        F.max_pool2d(leaf, 2)
        F.avg_pool2d(leaf, 2)
    return traffic.bytes_total, pointers.count(leaf.local.data_ptr()) == 2


def test_aligned_windows_send_and_copy_nothing(pools: Pools) -> None:
    mesh = Mesh(height=2, width=2)
    assert pools[4].run(sent_by_aligned_windows, mesh) == [(0, True)] * 4


def refusal(mesh: Mesh, name: str, options: Options) -> str:
    """The error that the call raises on this rank."""
    x = shard(torch.randn(2, 3, 4, 4), opened(mesh), natural_cut(mesh, 4))
    if "indices" in options:
        options["indices"] = shard(torch.full(x.shape, options["indices"]), opened(mesh), natural_cut(mesh, 4))
    try:
        getattr(F, name)(x, **options)
    except (UnsupportedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


REFUSED: list[tuple[str, Options, str]] = [
    (
        "max_pool2d",
        {"kernel_size": 2, "padding": 1, "dilation": 5},
        "UnsupportedError: `dilation` (=5) with padding 1 makes a window that covers no index of an input of extent 4",
    ),
    (
        "max_pool2d",
        {"kernel_size": 2, "padding": 2},
        "OperatorRuntimeError: `max_pool2d` on Sharded(2, 3, 4, 4): pad should be at most half of",
    ),
    ("avg_pool2d", {"kernel_size": 5}, "OperatorRuntimeError: `avg_pool2d` on Sharded(2, 3, 4, 4): Given input size"),
    (
        "max_pool2d",
        {"kernel_size": (2, 2, 2)},
        "UnsupportedError: `kernel_size` (=(2, 2, 2)) must be one or 2 whole numbers of at least 1.",
    ),
    (
        "lp_pool2d",
        {"norm_type": math.inf, "kernel_size": 2},
        "UnsupportedError: `norm_type` (=inf) must be finite, because torch versions differ on it; "
        "use `F.max_pool2d(x.abs(), ...)`.",
    ),
    (
        "max_unpool2d",
        {"kernel_size": 2, "indices": 64},
        "UnsupportedError: `indices` must be between 0 and 63 for an output of spatial extents (8, 8); pass the "
        "`output_size` of the tensor that was pooled.",
    ),
    ("fractional_max_pool2d", {"kernel_size": 2, "output_size": 2}, "UnsupportedError: "),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_refused(name: str, options: Options, message: str, pools: Pools) -> None:
    for error in pools[2].run(refusal, Mesh(height=2), name, options):
        assert error.startswith(message)


def test_integers_are_not_averaged(pools: Pools) -> None:
    messages = pools[2].run(refusal_of_integers, Mesh(height=2))
    assert messages == ["`input` (of torch.int64) must be floating point to be averaged over ranks."] * 2


def refusal_of_integers(mesh: Mesh) -> str:
    x: Any = shard(torch.ones(1, 1, 4, 4, dtype=torch.int64), opened(mesh), natural_cut(mesh, 4))
    with pytest.raises(UnsupportedError) as refused:
        F.avg_pool2d(x, 2)
    return str(refused.value)


@given(data=st.data())
@draws(60)
def test_pooling_for_a_compiler_chooses_as_torch_does(data: st.DataObject) -> None:
    """Many equal values, infinities and a NaN; windows that overlap, leave gaps or a rest, and reach into padding."""
    dims = data.draw(st.integers(1, 3))
    kernel = tuple(data.draw(st.integers(1, 3)) for _ in range(dims))
    stride = tuple(data.draw(st.integers((k + 1) // 2, 4)) for k in kernel)
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    extents = tuple(data.draw(st.integers(k, 7)) for k in kernel)
    ceil = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randint(0, 3, (2, 2, *extents), generator=generator).double()
    values[0, 0] = -torch.inf
    values[1, 1].view(-1)[-1] = torch.nan
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    expected = getattr(F, f"max_pool{dims}d")(theirs, kernel, stride, padding, 1, ceil)
    found = fused_max(ours, Windows(kernel, stride, padding, extents, tuple(expected.shape[2:])))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    found.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-15, atol=1e-15)
