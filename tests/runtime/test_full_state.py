"""Weights between single-device checkpoints, plans and meshes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import convmesh as cm
from convmesh import Mesh, UnsupportedError
from convmesh.errors import ShapeError
from convmesh.plans import strategy_for
from tests.conftest import Pools
from tests.runtime.training import fresh

MESHES = [Mesh(data=2, filter=2), Mesh(channel=2, filter=2), Mesh(height=2, width=2), Mesh(data=4)]


def with_norm() -> nn.Module:
    """Weights, statistics and a count of batches."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8),
    ).double()  # fmt: skip


def round_trip(mesh: Mesh, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = with_norm()
    names = [name for name, _ in model.named_parameters()]
    strategy = {"*": {"channel": ["channel", "filter"]}} if "channel" in mesh.axes else strategy_for(mesh)
    net = cm.parallelize(model, cm.plan(model, (4, 4, 8, 8), mesh, strategy), loss=F.cross_entropy)
    assert [name for name, _ in net.named_parameters()] == names
    net.load_full_state_dict(state)
    return net.full_state_dict()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_checkpoint_round_trips_bit_for_bit(pools: Pools, mesh: Mesh) -> None:
    state = with_norm().state_dict()
    state = {k: torch.rand_like(v) if v.is_floating_point() else v + 3 for k, v in state.items()}
    for found in pools[4].run(round_trip, mesh, state):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())


def save_on(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    model, x, target, loss_of = fresh("lenet5")
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy_for(mesh)), loss=loss_of)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net(net.shard_input(x), net.shard_target(target)).backward()
    opt.step()
    save({"net": net.state_dict()}, checkpoint_id=folder)
    return net.full_state_dict()


def load_on(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    model, x, _, loss_of = fresh("lenet5")
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy_for(mesh)), loss=loss_of)
    state = {"net": net.state_dict()}
    load(state, checkpoint_id=folder)
    net.load_state_dict(state["net"])
    return net.full_state_dict()


def test_distributed_checkpoints_move_between_meshes(pools: Pools, tmp_path: Path) -> None:
    saved = pools[4].run(save_on, Mesh(data=2, filter=2), tmp_path)[0]
    for mesh in (Mesh(channel=3), Mesh(data=2), Mesh(height=2, width=2)):
        for found in pools[mesh.size].run(load_on, mesh, tmp_path):
            assert all(torch.equal(found[name], value) for name, value in saved.items())


def read_after_a_step() -> list[dict[str, torch.Tensor]]:
    """`state_dict()` right after an update that is still on its way, and the weights once it has arrived."""
    model, x, target, loss_of = fresh("lenet5")
    mesh = Mesh(data=2)
    net = cm.parallelize(model, cm.plan(model, x, mesh, "data", reduction="broadcast"), loss=loss_of)
    net(net.shard_input(x), net.shard_target(target)).backward()
    net.optimizer(torch.optim.SGD, lr=0.1).step()
    read = {name: value.clone() for name, value in net.state_dict().items()}
    return [read, net.full_state_dict()]


def test_a_state_dict_waits_for_updates_that_are_on_their_way(pools: Pools) -> None:
    for read, arrived in pools[2].run(read_after_a_step):
        assert all(torch.equal(read[name], value) for name, value in arrived.items())


def wide() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 12, 3, padding=1))


def from_meta(mesh: Mesh, seed: int | None, state: dict[str, torch.Tensor] | None) -> tuple[Any, ...]:
    with torch.device("meta"):
        model = wide()
    net = cm.parallelize(model, cm.plan(model, (4, 3, 8, 8), mesh, strategy_for(mesh)), loss=F.mse_loss)
    assert all(p.is_meta for p in net.parameters())
    x, target = torch.ones(4, 3, 8, 8), torch.zeros(4, 12, 8, 8)
    with pytest.raises(UnsupportedError, match=r"no weights yet; call `net\.load_full_state_dict"):
        net(net.shard_input(x), net.shard_target(target))
    if state is not None:
        net.load_full_state_dict(state)
    else:
        assert seed is not None
        net.reset_parameters(seed)
    loss = net(net.shard_input(x), net.shard_target(target))
    loss.backward()
    held = sum(getattr(p, "_local_tensor", p).untyped_storage().nbytes() for p in net.parameters())
    return net.full_state_dict(), net.full_gradients(), held


@pytest.mark.parametrize("mesh", [Mesh(filter=2), Mesh(height=2)], ids=str)
def test_a_meta_model_gets_memory_only_for_its_shards(pools: Pools, mesh: Mesh) -> None:
    torch.manual_seed(5)
    state = wide().state_dict()
    drawn = pools[2].run(from_meta, mesh, 7, None)
    again = pools[1].run(from_meta, Mesh(), 7, None)
    loaded = pools[2].run(from_meta, mesh, None, state)
    whole = sum(v.nbytes for k, v in state.items() if "running" not in k and "num_" not in k)
    for found, gradients, held in drawn:
        torch.testing.assert_close((found, gradients), again[0][:2], rtol=1e-5, atol=1e-6)
        assert held == whole if "height" in mesh.axes else held < 0.52 * whole
    assert all(
        torch.equal(loaded[0][0][name], value) for name, value in state.items() if name.endswith(("weight", "bias"))
    )


def mistaken(mesh: Mesh) -> list[str]:
    model = wide()
    net = cm.parallelize(model, cm.plan(model, (4, 3, 8, 8), mesh, strategy_for(mesh)))
    state = net.full_state_dict()
    said = []
    for wrong in (
        {k: v for k, v in state.items() if k != "0.bias"},
        {**state, "9.weight": state["0.bias"]},
        {**state, "0.bias": torch.zeros(3)},
    ):
        with pytest.raises(ShapeError) as error:
            net.load_full_state_dict(wrong)
        said.append(str(error.value))
    return said


def test_states_of_other_networks_are_refused_and_change_nothing(pools: Pools) -> None:
    for said in pools[2].run(mistaken, Mesh(filter=2)):
        assert said == [
            "the state has no '0.bias' (1 of 9 names are missing).",
            "the state has '9.weight', which the network has not (1 such names).",
            "the state's '0.bias' has shape (3,), the network's (16,).",
        ]
