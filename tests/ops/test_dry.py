"""A dry mesh sends what a real one sends, byte for byte, without processes."""

import pytest
import torch
import torch.nn.functional as F

from convmesh import Mesh, OpenMesh, shard
from convmesh.dist import Traffic, dry_mesh
from convmesh.ops import dice_loss
from convmesh.testing import RankPool, natural_cut, opened
from tests.ops.test_network import DEEP_MESHES, MESHES, NETWORKS


def step_traffic(name: str, mesh: OpenMesh) -> Traffic:
    """Bytes that this rank sends in one training step."""
    make, shape = NETWORKS[name]
    net = make().double().to(mesh.device)
    dense = name == "classifier"
    cut = natural_cut(mesh.mesh, len(shape))
    x = shard(torch.zeros(shape, dtype=torch.float64, device=mesh.device), mesh, cut)
    labels = torch.zeros((shape[0],) if dense else (shape[0], *shape[2:]), dtype=torch.int64, device=mesh.device)
    target = shard(labels, mesh, {d - (d > 1): axis for d, axis in cut.items() if not dense or d == 0})
    with mesh.traffic.watch() as sent:
        logits = net(x)
        loss = F.cross_entropy(logits, target) + (0 if dense else dice_loss(logits, target))  # type: ignore[arg-type]
        loss.backward()
    return sent


def dry_traffic(name: str, mesh: Mesh) -> list[Traffic]:
    return [step_traffic(name, dry_mesh(mesh, rank)) for rank in range(mesh.size)]


def real_traffic(name: str, mesh: Mesh) -> Traffic:
    return step_traffic(name, opened(mesh))


RUNS = [(name, mesh) for name, (_, shape) in NETWORKS.items() for mesh in MESHES + DEEP_MESHES * (len(shape) > 4)]


@pytest.mark.parametrize(("name", "mesh"), RUNS, ids=str)
def test_dry_traffic_equals_real_traffic(name: str, mesh: Mesh, pools: dict[int, RankPool]) -> None:
    real = pools[mesh.size].run(real_traffic, name, mesh)
    assert pools[1].run(dry_traffic, name, mesh)[0] == real
    assert min(rank.bytes_total for rank in real) > 0


def test_a_step_of_many_ranks_needs_no_processes(pools: dict[int, RankPool]) -> None:
    pools[1].run(step_of_many_ranks)


def step_of_many_ranks() -> None:
    mesh = dry_mesh(Mesh(data=64, depth=4, height=4, width=4), rank=2048)
    x = shard(torch.empty(64, 1, 512, 512, 512, device="meta"), mesh, natural_cut(mesh.mesh, 5))
    weight = torch.empty(8, 1, 3, 3, 3, device="meta", requires_grad=True)
    with mesh.traffic.watch() as sent:
        y = F.conv3d(x, weight, padding=1)  # type: ignore[call-overload]
        y.backward(torch.empty_like(y.local))
    assert y.shape == (64, 8, 512, 512, 512)
    assert sent.calls["neighbour"] == 7  # a rank at the corner of the volume sends 3 faces, 3 edges and a corner
    assert sent.bytes_sent["neighbour"] == 4 * (3 * 128**2 + 3 * 128 + 1)
