"""Norms whose running statistics every rank holds whole, as subclasses of torch's layers do that call F.batch_norm."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from convmesh import Mesh, OpenMesh, shard
from convmesh.dist import Traffic, dry_mesh
from convmesh.testing import RankPool, opened

SHAPE = (4, 6, 5, 3)
MESHES = [Mesh(channel=2), Mesh(data=2, channel=2), Mesh(channel=3)]


def statistics(call: Any, mesh: OpenMesh) -> tuple[list[Any], list[Any], Traffic]:
    """Running statistics after a step on one device and on shards, and what was sent."""
    x = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(mesh.device)
    one, split = (
        [torch.zeros(6, dtype=torch.float64).to(mesh.device), torch.ones(6, dtype=torch.float64).to(mesh.device)]
        for _ in range(2)
    )
    call(x, *one)
    cut: Any = shard(x, mesh, {0: "data", 1: "channel"} if "data" in mesh.mesh.axes else {1: "channel"})
    cut.requires_grad = True
    with mesh.traffic.watch() as sent:
        call(cut, *split).square().sum().backward()
    return [t.tolist() for t in one if not t.is_meta], [t.tolist() for t in split if not t.is_meta], sent


def batch(x: Any, mean: torch.Tensor, var: torch.Tensor) -> Any:
    return F.batch_norm(x, mean, var, training=True)


def instance(x: Any, mean: torch.Tensor, var: torch.Tensor) -> Any:
    return F.instance_norm(x, mean, var)


def real(call: Any, mesh: Mesh) -> Traffic:
    one, split, sent = statistics(call, opened(mesh))
    torch.testing.assert_close(split, one, rtol=1e-12, atol=1e-12)
    return sent


@pytest.mark.parametrize("call", [batch, instance])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_whole_statistics_are_those_of_one_device(call: Any, mesh: Mesh, pools: dict[int, RankPool]) -> None:
    sent = pools[mesh.size].run(real, call, mesh)
    assert [statistics(call, dry_mesh(mesh, rank))[2] for rank in range(mesh.size)] == sent
