"""Wrong labels on a GPU: the next step ends in one error on every rank, and no kernel asserts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import LabelError, Mesh
from convmesh.ops import dice_loss
from convmesh.plans import strategy_for
from convmesh.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

SHAPE = (4, 3, 8, 8)


def in_a_network(mesh: Mesh) -> list[str]:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 3, 3, padding=1)
    opened = cm.open_mesh(mesh, device="cuda")
    plan = cm.plan(model, SHAPE, mesh, strategy_for(mesh))
    net = cm.parallelize(model, plan, loss=F.cross_entropy, mesh=opened)
    x, target = net.shard_input(torch.randn(SHAPE)), net.shard_target(torch.zeros(4, 8, 8, dtype=torch.int64))
    told = [str(net(x, target).isnan().item())]
    if opened.rank == 1:
        target[0, 0, 0] = 77
    told.append(str(net(x, target).isnan().item()))
    try:
        net(x, target)
    except LabelError as error:
        told.append(str(error))
    torch.cuda.synchronize()
    return told


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(filter=2)], ids=str)
def test_the_next_step_ends_on_every_rank(mesh: Mesh) -> None:
    first, second = run_ranks(2, in_a_network, mesh, seconds_timeout=240)
    assert first == second
    assert first[:2] == ["False", "True"]
    assert "rank 1 has label 77; labels of 3 classes must be from 0 to 2" in first[2]


def on_tensors() -> str:
    opened = cm.open_mesh(Mesh(data=2), device="cuda")
    x: Any = cm.shard(torch.randn(SHAPE, device="cuda"), opened, {0: "data"})
    target: Any = cm.shard(torch.full((4, 8, 8), -5, device="cuda"), opened, {0: "data"})
    loss: Any = F.cross_entropy(x, target)
    assert loss.local.isnan()
    with pytest.raises(LabelError) as caught:
        dice_loss(x, target)
    return str(caught.value)


def test_without_a_network() -> None:
    first, second = run_ranks(2, on_tensors, seconds_timeout=240)
    assert "rank 0 has label -5" in first
    assert first == second
