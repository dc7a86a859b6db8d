"""Split operators on a GPU: several ranks share one device and Gloo stages their messages through the host."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from convmesh import Mesh, init, open_mesh, shard
from convmesh.testing import SplitCase, run_ranks
from tests.gpu.conftest import Ranks

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]


def small_network(x: Any, w1: Any, w2: Any, gain: Any, bias: Any) -> Any:
    y = F.batch_norm(F.conv3d(x, w1, padding=1), None, None, gain, bias, training=True)
    y = F.max_pool3d(F.relu(y), 3, 2, 1)
    y = F.interpolate(F.conv3d(y, w2, stride=2, padding=1), scale_factor=2.0, mode="trilinear")
    return torch.cat([y, F.group_norm(y, 2)], 1).mean((2, 3, 4))


def convolve(x: Any, weight: Any) -> Any:
    return F.conv3d(x, weight, padding=1)


MESHES = [Mesh(), Mesh(depth=2), Mesh(depth=2, height=2), Mesh(data=2, width=2), Mesh(depth=3)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_network_on_one_gpu(mesh: Mesh, dtype: torch.dtype, ranks: Ranks) -> None:
    fn = small_network if dtype == torch.float64 else convolve
    params = ((4, 3, 3, 3, 3), (4, 4, 3, 3, 3), (4,), (4,)) if dtype == torch.float64 else ((4, 3, 3, 3, 3),)
    case = SplitCase(fn, mesh, ((2, 3, 9, 8, 11),), params, dtype=dtype, device="cuda")
    ranks(mesh.size).run(SplitCase.check, case)


def nccl_alone() -> str:
    dist.destroy_process_group()
    init()
    mesh = open_mesh(Mesh())
    x = shard(torch.randn(1, 2, 8, 8, device="cuda"), mesh, {}).detach()
    y = F.conv2d(x, torch.randn(3, 2, 3, 3, device="cuda"), padding=1)  # type: ignore[call-overload]
    return f"{dist.get_backend()} {mesh.device.type} {tuple(y.shape)}"


def test_one_rank_uses_nccl() -> None:
    assert run_ranks(1, nccl_alone, seconds_timeout=240) == ["nccl cuda (1, 3, 8, 8)"]
