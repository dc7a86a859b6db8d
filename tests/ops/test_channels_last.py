"""Channels-last shards: norms keep the format, and so do a network's activations and gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from convmesh import Mesh, shard
from convmesh.testing import RankPool, SplitCase, natural_cut, opened

Check = Callable[[SplitCase], None]
LAST = torch.channels_last_3d


def batch(x: Any, weight: Any, bias: Any) -> Any:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def group(x: Any, weight: Any, bias: Any) -> Any:
    return F.group_norm(x, 2, weight, bias)


def instance(x: Any, weight: Any, bias: Any) -> Any:
    return F.instance_norm(x, None, None, weight, bias)


def far_from_zero(x: Any, weight: Any, bias: Any, norm: Callable[..., Any]) -> Any:
    if isinstance(x, torch.Tensor):  # torch's own float32 norms lose digits then
        return norm(x.double() + 20.0, weight.double(), bias.double()).to(x.dtype)
    return norm(x + 20.0, weight, bias)


@pytest.mark.parametrize("mesh", [Mesh(depth=2), Mesh(data=2, width=2)], ids=str)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("norm", [batch, group, instance])
def test_norms_of_channels_last(norm: Callable[..., Any], samples: int, mesh: Mesh, check: Check) -> None:
    """Float32 with a mean far from 0, and enough values for sequential sums to lose digits."""
    for dtype, space in ((torch.float64, (5, 4, 7)), (torch.float32, (32, 24, 24))):
        fn = partial(far_from_zero, norm=norm)
        check(SplitCase(fn, mesh, ((samples, 4, *space),), ((4,), (4,)), dtype=dtype, memory_format=LAST))


def formats(mesh: Mesh) -> list[str]:
    """The activations and gradients of a small U-Net that are not channels-last."""
    torch.manual_seed(0)
    enter, inner, rise = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 8, 3, padding=1), nn.ConvTranspose3d(8, 4, 2, 2)
    x = shard(torch.randn(1, 1, 8, 8, 8), opened(mesh), natural_cut(mesh, 5))
    wrong: list[str] = []

    def watch(name: str, y: Any) -> Any:
        note(name, y.local)
        y.local.register_hook(lambda grad: note(f"gradient of {name}", grad))
        return y

    def note(name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous(memory_format=LAST):
            wrong.append(f"{name}: {tensor.shape} {tensor.stride()}")

    top = F.relu(watch("group norm", F.group_norm(watch("convolution", enter(x)), 2)))
    low = watch("relu", F.relu(inner(watch("pooling", F.max_pool3d(top, 2)))))
    joined = watch("concatenation", torch.cat([top, rise(low)], 1))
    head: Any = F.conv3d(joined, torch.randn(3, 8, 1, 1, 1))
    head.local.square().mean().backward()
    return wrong


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_a_network_stays_channels_last(pools: dict[int, RankPool]) -> None:
    for wrong in pools[2].run(formats, Mesh(depth=2)):
        assert wrong == []
