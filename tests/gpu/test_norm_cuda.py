"""Normalisation, reductions and softmax on a GPU: other kernels than on CPUs, and autocast's float32 list."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from convmesh import Mesh, open_mesh, shard
from convmesh.testing import SplitCase
from tests.gpu.conftest import Ranks

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]


def batch_norm(x: Any, weight: Any = None, bias: Any = None, shift: float = 0.0) -> Any:
    if isinstance(x, torch.Tensor) and shift:  # torch's own float32 is less precise than the tolerance
        return F.batch_norm(x.double() + shift, None, None, weight.double(), bias.double(), training=True).to(x.dtype)
    return F.batch_norm(x + shift, None, None, weight, bias, training=True)


def group_norm(x: Any, *params: Any) -> Any:
    return F.group_norm(x, 2, *params)


def instance_norm(x: Any, *params: Any) -> Any:
    return F.instance_norm(x, None, None, *params)


def layer_norm(x: Any, *params: Any) -> Any:
    return F.layer_norm(x, x.shape[-2:])


def reductions(x: Any, *params: Any) -> Any:
    """All kinds; products and norms only of few values."""
    values, indices = x.max(2)
    spreads = (x.var(2, correction=0), torch.linalg.vector_norm(x, 2, (1, 2)), x.prod(1))
    return x.sum(2), x.mean(), x.amax((0, 2)), values, indices, x.argmax(), *spreads


def softmax(x: Any, *params: Any) -> Any:
    return F.softmax(x, 2), F.log_softmax(x, 3), torch.logsumexp(x, (2, 3)), F.softmax(x, 1)


FUNCTIONS: list[Callable[..., Any]] = [batch_norm, group_norm, instance_norm, layer_norm, reductions, softmax]
SHAPES = [(4, 6, 9, 10), (2, 6, 188, 260), (1, 6, 3, 4)]


def all_cases(mesh: Mesh) -> None:
    for shape in SHAPES:
        for memory_format in (torch.contiguous_format, torch.channels_last):
            case = partial(SplitCase, mesh=mesh, inputs=(shape,), memory_format=memory_format, device="cuda")
            for fn in FUNCTIONS:
                case(fn, params=((6,), (6,))).check()
            case(batch_norm, dtype=torch.float32).check()
            if shape[0] > 1 and memory_format == torch.contiguous_format:
                case(partial(batch_norm, shift=50.0), params=((6,), (6,)), dtype=torch.float32).check()


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(height=2), Mesh(data=2, height=2)], ids=str)
def test_norms_reductions_and_softmax(mesh: Mesh, ranks: Ranks) -> None:
    ranks(mesh.size).run(all_cases, mesh)


def types_under_autocast(mesh: Mesh) -> list[tuple[torch.dtype, torch.dtype]]:
    """Result types of a single device and of shards."""
    opened = open_mesh(mesh, device="cuda")
    x = torch.randn(2, 6, 8, 10, device="cuda", dtype=torch.bfloat16)
    sharded = shard(x, opened, {2: "height"})
    norms = [nn.BatchNorm2d(6), nn.GroupNorm(2, 6), nn.InstanceNorm2d(6), nn.LayerNorm([8, 10]), nn.Softmax(2)]
    reductions = ["sum", "mean", "logsumexp", "prod", "norm", "amax", "var", "argmax"]
    functions: list[Callable[..., Any]] = [norm.cuda() for norm in norms] + [
        lambda t, name=name: getattr(t, name)(dim=2) for name in reductions
    ]
    functions += [F.normalize, lambda t: F.rms_norm(t, (10,))]
    with torch.autocast("cuda", torch.bfloat16):
        return [(f(x).dtype, f(sharded).dtype) for f in functions]


def test_types_under_autocast(ranks: Ranks) -> None:
    for pairs in ranks(2).run(types_under_autocast, Mesh(height=2)):
        assert [found for _, found in pairs] == [expected for expected, _ in pairs]
