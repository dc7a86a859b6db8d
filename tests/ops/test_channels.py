"""Layers with cut channels: stationary-x, -y and -w against a single device."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convmesh import Mesh, Sharded, shard
from convmesh.dist import copy_over
from convmesh.dist.cut_weights import cut_weight
from convmesh.dist.exchange import fetch
from convmesh.layout import plan_exchange
from convmesh.layout.channels import Algorithm, ChannelSplit, Sums, channel_layouts, split_for
from convmesh.layout.maps import Same
from convmesh.ops.channels.channel_layers import cut_embedding, cut_linear
from convmesh.testing import RankPool, SplitCase, opened
from convmesh.testing.strategies import extents, spatial_dims
from tests.draws import draws

Check = Callable[[SplitCase], None]
Cut = dict[int, Any]
CONV: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

GRIDS: list[Mesh] = [
    Mesh(channel=2),
    Mesh(filter=3),
    Mesh(channel=2, filter=2),
    Mesh(channel=4),
    Mesh(data=2, channel=2),
    Mesh(height=2, filter=2),
    Mesh(width=2, channel=3),
    Mesh(channel=2, filter=3),
    Mesh(data=2, width=2, channel=2),
    Mesh(height=2, channel=2, filter=2),
    Mesh(depth=2, height=2, filter=2),
]
on_channel_grids = pytest.mark.parametrize("mesh", GRIDS, ids=lambda m: "x".join(f"{k}{v}" for k, v in m.axes.items()))

TOKEN_GRIDS = [
    Mesh(channel=2),
    Mesh(filter=3),
    Mesh(channel=2, filter=2),
    Mesh(data=2, channel=2),
    Mesh(width=2, filter=2),
]
on_token_grids = pytest.mark.parametrize(
    "mesh", TOKEN_GRIDS, ids=lambda m: "x".join(f"{k}{v}" for k, v in m.axes.items())
)


def channel_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in ("channel", "filter") if name in mesh.axes)


def algorithms(mesh: Mesh) -> st.SearchStrategy[Algorithm]:
    return st.sampled_from(["x", "y", "w"] if len(channel_axes(mesh)) == 2 else ["x", "y"])


def cut(x: Any, weight: Any, bias: Any, split: ChannelSplit, filter_dim: int = 0) -> tuple[Any, Any]:
    """The weight and bias as shards if the input is one; their gradients are summed so that whole leaves see them."""
    if not isinstance(x, Sharded):
        return weight, bias
    (weight,) = copy_over(x.mesh, split.axes, weight)
    # Ranks along the kept axes hold the same bias block and compute the same gradient: it counts once.
    (bias,) = copy_over(x.mesh, split.gathered, bias)
    weight = cut_weight(weight, x.mesh, {filter_dim: split.gathered, 1 - filter_dim: split.kept})
    return weight, None if bias is None else cut_weight(bias, x.mesh, {0: split.gathered})


def convolve(x: Any, weight: Any, bias: Any = None, *, split: ChannelSplit, **options: Any) -> Any:
    weight, bias = cut(x, weight, bias, split)
    return CONV[weight.dim() - 2](x, weight, bias, **options)


def convolve_transposed(x: Any, weight: Any, bias: Any = None, *, split: ChannelSplit, **options: Any) -> Any:
    weight, bias = cut(x, weight, bias, split, filter_dim=1)
    return CONV_TRANSPOSE[weight.dim() - 2](x, weight, bias, **options)


def dense(x: Any, weight: Any, bias: Any = None, *, split: ChannelSplit) -> Any:
    weight, bias = cut(x, weight, bias, split)
    return F.linear(x, weight, bias)


def natural(mesh: Mesh, dims: int, channels_by: tuple[str, ...]) -> Cut:
    spatial = ("depth", "height", "width")[3 - (dims - 2) :] if dims > 2 else ()
    cut_by_dim: Cut = {2 + i: name for i, name in enumerate(spatial) if name in mesh.axes}
    if "data" in mesh.axes:
        cut_by_dim[0] = "data"
    return cut_by_dim | ({1: channels_by} if channels_by else {})


@on_channel_grids
@draws(20)
@given(data=st.data())
@pytest.mark.operator("convolution, cut channels", "stationary-x, -y and -w; uneven channels; stride, dilation, halos")
def test_convolution(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    axes = channel_axes(mesh)
    split = split_for(data.draw(algorithms(mesh)), data.draw(st.sampled_from([axes, axes[::-1]])))
    channels, filters = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    kernel, stride, dilation, padding = (
        tuple(data.draw(st.integers(low, high)) for _ in range(spatial))
        for low, high in ((1, 4), (1, 2), (1, 2), (0, 2))
    )
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    space = tuple(max(n, m) for n, m in zip(data.draw(extents(spatial, 1, 8)), least, strict=True))
    shape = (data.draw(st.integers(1, 3)), channels, *space)
    # The input's cut suits the layer, or has another order, or the input is whole, as a first layer's is.
    channels_by = data.draw(st.sampled_from([split.axes, axes, ()]))
    params: tuple[tuple[int, ...], ...] = ((filters, channels, *kernel),)
    if data.draw(st.booleans()):
        params += ((filters,),)
    fn = partial(convolve, split=split, stride=stride, padding=padding, dilation=dilation)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]))
    check(SplitCase(fn, mesh, (shape,), params, dtype=dtype, cuts=(natural(mesh, len(shape), channels_by),)))


@on_channel_grids
@draws(12)
@given(data=st.data())
@pytest.mark.operator("transposed convolution, cut channels", "stationary-x, -y and -w; uneven channels; halos")
def test_transposed_convolution(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    axes = channel_axes(mesh)
    split = split_for(data.draw(algorithms(mesh)), axes)
    channels, filters = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    kernel, stride = (tuple(data.draw(st.integers(1, top)) for _ in range(spatial)) for top in (4, 3))
    space = data.draw(extents(spatial, 1, 6))
    most = [((n - 1) * s + k - 1) // 2 for n, s, k in zip(space, stride, kernel, strict=True)]
    padding = tuple(data.draw(st.integers(0, min(2, m))) for m in most)
    extra = tuple(data.draw(st.integers(0, s - 1)) for s in stride)
    fn = partial(convolve_transposed, split=split, stride=stride, padding=padding, output_padding=extra)
    shape = (data.draw(st.integers(1, 2)), channels, *space)
    params: tuple[tuple[int, ...], ...] = ((channels, filters, *kernel), (filters,))
    check(SplitCase(fn, mesh, (shape,), params, cuts=(natural(mesh, len(shape), axes),)))


FLAT_GRIDS = [mesh for mesh in GRIDS if not {*mesh.axes} & {"depth", "height", "width"}]


@pytest.mark.parametrize("mesh", FLAT_GRIDS, ids=str)
@given(data=st.data())
@pytest.mark.operator("linear, cut channels", "stationary-x, -y and -w; uneven features")
def test_dense(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    axes = channel_axes(mesh)
    split = split_for(data.draw(algorithms(mesh)), axes)
    samples, features, out = (data.draw(st.integers(1, 9)) for _ in range(3))
    params = ((out, features), (out,))
    check(SplitCase(partial(dense, split=split), mesh, ((samples, features),), params, cuts=(natural(mesh, 2, axes),)))


def dense_on_tokens(x: Any, weight: Any, bias: Any = None, *, split: ChannelSplit) -> Any:
    weight, bias = cut(x, weight, bias, split)
    return cut_linear(x, weight, bias, split.sums) if isinstance(x, Sharded) else F.linear(x, weight, bias)


@on_token_grids
@draws(8)
@given(data=st.data())
@pytest.mark.operator("linear, cut features", "tokens before the features; sums to features, tokens or every rank")
def test_dense_on_tokens(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    axes = channel_axes(mesh)
    sums: Sums = data.draw(st.sampled_from(get_args(Sums)))
    split = split_for(data.draw(algorithms(mesh)), data.draw(st.sampled_from([axes, axes[::-1]])), sums)
    tokens = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    shape = (data.draw(st.integers(1, 3)), *tokens, data.draw(st.integers(1, 9)))
    filters = data.draw(st.integers(1, 9))
    params: tuple[tuple[int, ...], ...] = ((filters, shape[-1]),)
    if data.draw(st.booleans()):
        params += ((filters,),)
    space = tuple(name for name in ("depth", "height", "width") if name in mesh.axes)
    # Features are cut, or nothing is, or the tokens are by the axes that cut the weight: then the layer gathers them.
    cuts: Cut = data.draw(st.sampled_from([{-1: axes, 1: space}, {1: space}, {len(tokens): (*space, *axes)}]))
    cuts |= {0: "data"} if "data" in mesh.axes else {}
    check(SplitCase(partial(dense_on_tokens, split=split), mesh, (shape,), params, cuts=(cuts,)))


def looked_up(x: Any, table: Any, *, split: ChannelSplit, padding: int | None) -> Any:
    words = (x * 4).abs().clamp(max=len(table) - 1).long()
    if not isinstance(x, Sharded):
        return F.embedding(words, table, padding)
    cut_table, _ = cut(x, table, None, split, filter_dim=1)
    return cut_embedding(words, cut_table, padding, split.sums)


@on_token_grids
@draws(4)
@given(data=st.data())
@pytest.mark.operator("embedding, cut table", "by features, or by words with sums to features, tokens or every rank")
def test_embedding(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    axes = channel_axes(mesh)
    split = split_for(data.draw(algorithms(mesh)), axes, data.draw(st.sampled_from(get_args(Sums))))
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7)))
    table = (data.draw(st.integers(max(2, mesh.extent(axes)), 11)), data.draw(st.integers(1, 6)))
    tokens = tuple(name for name in ("depth", "height", "width") if name in mesh.axes)
    cuts: Cut = {1: data.draw(st.sampled_from([tokens, (*tokens, *axes)]))}
    cuts |= {0: "data"} if "data" in mesh.axes else {}
    fn = partial(looked_up, split=split, padding=data.draw(st.sampled_from([None, 0, 1])))
    check(SplitCase(fn, mesh, (shape,), (table,), cuts=(cuts,)))


def transposed_groups(x: Any, weight: Any, bias: Any, split: ChannelSplit, groups: int) -> Any:
    weight, bias = cut(x, weight, bias, split, filter_dim=0)
    return CONV_TRANSPOSE[weight.dim() - 2](x, weight, bias, stride=2, padding=1, output_padding=1, groups=groups)


@on_channel_grids
@given(data=st.data())
def test_transposed_groups(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    axes = channel_axes(mesh)
    groups = mesh.extent(axes) * data.draw(st.integers(1, 2))
    width, ratio = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    shape = (data.draw(st.integers(1, 2)), groups * width, *data.draw(extents(spatial, 2, 5)))
    params = ((groups * width, ratio, *[3] * spatial), (groups * ratio,))
    fn = partial(transposed_groups, split=ChannelSplit(gathered=axes), groups=groups)
    check(SplitCase(fn, mesh, (shape,), params, cuts=(natural(mesh, len(shape), axes),)))


@on_channel_grids
@given(data=st.data())
@pytest.mark.operator("grouped and depthwise convolution, cut channels", "nothing travels but halos")
def test_groups(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    axes = channel_axes(mesh)
    groups = mesh.extent(axes) * data.draw(st.integers(1, 2))
    width, ratio = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    split = ChannelSplit(gathered=axes)
    shape = (data.draw(st.integers(1, 2)), groups * width, *data.draw(extents(spatial, 3, 7)))
    params = ((groups * ratio, width, *[3] * spatial), (groups * ratio,))
    fn = partial(convolve, split=split, groups=groups, padding=1)
    check(SplitCase(fn, mesh, (shape,), params, cuts=(natural(mesh, len(shape), axes),)))


def copies_of_a_gather(mesh: Mesh, memory_format: torch.memory_format, samples: int) -> list[int]:
    """Elements copied by gathering channels, apart from the rank's own part."""
    x = shard(torch.randn(samples, 8, 6, 6), opened(mesh), {1: "channel"})
    local = x.local.contiguous(memory_format=memory_format)
    layouts = channel_layouts(x.layout, (Same(),) * 4, 8, ChannelSplit(gathered=("channel",)))
    plan = plan_exchange(x.layout, layouts.input_needs, opened(mesh).rank)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as counter:
        whole = fetch(opened(mesh), plan, local, memory_format)
    assert torch.equal(whole[x.box.slices()], local)
    shapes = [e.input_shapes[0] for e in counter.events() if e.name == "aten::copy_"]
    return [torch.Size(shape).numel() for shape in shapes if shape]


def test_gathered_channels_land_in_place_where_the_format_allows(pools: dict[int, RankPool]) -> None:
    own = 4 * 36
    assert pools[2].run(copies_of_a_gather, Mesh(channel=2), torch.contiguous_format, 1) == [[own]] * 2
    assert pools[2].run(copies_of_a_gather, Mesh(channel=2), torch.contiguous_format, 2) == [[2 * own] * 2] * 2
    assert pools[2].run(copies_of_a_gather, Mesh(channel=2), torch.channels_last, 1) == [[own] * 2] * 2
