"""Norms, pools and activations on inputs whose channels are cut."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convmesh import Mesh, Sharded, shard
from convmesh.dist import copy_over
from convmesh.dist.cut_weights import cut_weight
from convmesh.testing import RankPool, SplitCase, opened
from convmesh.testing.strategies import extents, spatial_dims
from tests.draws import draws
from tests.ops.test_channels import channel_axes, natural, on_channel_grids

Check = Callable[[SplitCase], None]


def normalise(x: Any, weight: Any, bias: Any, kind: str, groups: int, cuts_params: bool) -> Any:
    if cuts_params and isinstance(x, Sharded):
        axes = x.layout.cuts[1].axes
        weight, bias = (
            cut_weight(p, x.mesh, {0: axes}) for p in copy_over(x.mesh, axes, weight, bias) if p is not None
        )
    if kind == "batch":
        return F.batch_norm(x, None, None, weight, bias, training=True)
    if kind == "instance":
        return F.instance_norm(x, weight=weight, bias=bias)
    return F.group_norm(x, groups, weight, bias)


@on_channel_grids
@draws(12)
@given(data=st.data())
@pytest.mark.operator(
    "batch, instance and group norm, cut channels", "whole or cut parameters; groups that straddle ranks"
)
def test_norms(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    groups = data.draw(st.integers(1, 4))
    channels = groups * data.draw(st.integers(1, 4))
    kind = data.draw(st.sampled_from(["batch", "instance", "group", "group"]))
    shape = (data.draw(st.integers(2, 3)), channels, *data.draw(extents(spatial, 2, 6)))
    fn = partial(normalise, kind=kind, groups=groups, cuts_params=data.draw(st.booleans()))
    cuts = (natural(mesh, len(shape), channel_axes(mesh)),)
    check(SplitCase(fn, mesh, (shape,), ((channels,), (channels,)), cuts=cuts))


def layer_normalise(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, tuple(x.shape[1:]), weight, bias)


@on_channel_grids
@given(data=st.data())
@pytest.mark.operator("layer norm, cut channels", "over channels and space")
def test_layer_norm(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    spatial = data.draw(spatial_dims(mesh))
    inner = (data.draw(st.integers(1, 7)), *data.draw(extents(spatial, 2, 5)))
    cuts = (natural(mesh, spatial + 2, channel_axes(mesh)),)
    check(SplitCase(layer_normalise, mesh, ((2, *inner),), (inner, inner), cuts=cuts))


def channel_local(x: Any) -> Any:
    y = F.max_pool2d(F.relu(x), 2) + F.avg_pool2d(x * x, 2)
    return F.interpolate(y, scale_factor=2.0, mode="bilinear").softmax(1)


def test_channel_local_operators(check: Check) -> None:
    for mesh in (Mesh(channel=3), Mesh(height=2, channel=2), Mesh(channel=2, filter=2)):
        cuts = (natural(mesh, 4, channel_axes(mesh)),)
        check(SplitCase(channel_local, mesh, ((2, 5, 8, 6),), cuts=cuts))


def norm_traffic(mesh: Mesh, kind: str) -> int:
    """Bytes that a forward and backward pass of a norm with cut parameters sends."""
    x = shard(torch.randn(2, 8, 6, 4), opened(mesh), natural(mesh, 4, channel_axes(mesh)))
    x = x.like(x.local.requires_grad_())
    with opened(mesh).traffic.watch() as sent:
        weight, bias = (cut_weight(torch.ones(8), opened(mesh), {0: channel_axes(mesh)}) for _ in range(2))
        y = normalise(x, weight.requires_grad_(), bias.requires_grad_(), kind, groups=4, cuts_params=False)
        y.backward(torch.randn(y.local.shape))
    return sent.bytes_total


@pytest.mark.parametrize("kind", ["batch", "instance", "group"])
def test_norms_send_nothing_along_channel_axes(kind: str, pools: dict[int, RankPool]) -> None:
    assert pools[2].run(norm_traffic, Mesh(channel=2), kind) == [0, 0]
