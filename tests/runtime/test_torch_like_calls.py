"""Calls read like torch's: what a network knows of itself, nobody has to pass it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh import LayoutError, Mesh, UnsupportedError
from convmesh.plans import strategy_for
from convmesh.testing import opened
from tests.conftest import Pools

SHAPE = (4, 3, 8, 8)
CASES = [
    (Mesh(data=2), "bucketed"),
    (Mesh(data=2), "sharded"),
    (Mesh(data=2), "broadcast"),
    (Mesh(filter=2), "bucketed"),
    (Mesh(pipe=2), "bucketed"),
    (Mesh(data=2, filter=2), "sharded"),
    (Mesh(data=2, pipe=2), "sharded"),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)]
    return nn.Sequential(*convs, nn.ReLU(), nn.Conv2d(4, 2, 1)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in (SHAPE, (4, 2, 8, 8)))  # type: ignore[return-value]


def parallel(mesh: Mesh, reduction: str) -> tuple[Any, Any]:
    whole, (x, target) = model(), batch()
    plan = cm.plan(whole, x, mesh, strategy_for(mesh), reduction=reduction)  # type: ignore[arg-type]
    net = cm.parallelize(whole, plan, loss=nn.MSELoss())
    return net, (net.shard_input(x), net.shard_target(target))


def groups(parameters: Any) -> list[dict[str, Any]]:
    """Weights of layers apart from biases and norms, as most recipes want it."""
    listed = list(parameters)
    wide, flat = [p for p in listed if p.dim() > 1], [p for p in listed if p.dim() == 1]
    return [{"params": wide, "weight_decay": 0.1}, {"params": flat, "lr": 0.003}]


def trained_whole() -> tuple[list[float], dict[str, torch.Tensor]]:
    net, (x, target) = model(), batch()
    optimizer = torch.optim.SGD(groups(net.parameters()), lr=0.05, momentum=0.9)
    norms = []
    for _ in range(3):
        nn.functional.mse_loss(net(x), target).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
        optimizer.step()
        net.zero_grad()
    return norms, net.state_dict()


def trained(mesh: Mesh, reduction: str, clips: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Clipped as a method or as a function, over parameters or over the optimiser's; zeroed at the network."""
    net, args = parallel(mesh, reduction)
    optimizer = net.optimizer(torch.optim.SGD, groups(net.parameters()), lr=0.05, momentum=0.9)
    norms = []
    for _ in range(3):
        net(*args).backward()
        if clips == "net":
            norm = net.clip_grad_norm_(0.1)
        elif clips == "parameters":
            norm = cm.clip_grad_norm_(net.parameters(), 0.1)
        else:
            norm = cm.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)
        norms.append(norm.item())
        optimizer.step()
        net.zero_grad()
    return norms, net.full_state_dict()


@pytest.mark.parametrize(("mesh", "reduction"), CASES, ids=str)
@pytest.mark.parametrize("clips", ["net", "parameters", "optimizer"])
def test_clipping_and_groups_need_no_mesh(pools: Pools, mesh: Mesh, reduction: str, clips: str) -> None:
    ((norms, state),) = pools[1].run(trained_whole)
    for found_norms, found_state in pools[mesh.size].run(trained, mesh, reduction, clips):
        assert found_norms == pytest.approx(norms, rel=1e-10)
        torch.testing.assert_close(found_state, dict(state), rtol=1e-9, atol=1e-12)


def two_networks() -> tuple[float, float]:
    """The norm over two networks on two meshes, and the norms of each combined."""
    first, first_args = parallel(Mesh(data=2), "bucketed")
    second, second_args = parallel(Mesh(filter=2), "bucketed")
    first(*first_args).backward()
    second(*second_args).backward()
    alone = [net.clip_grad_norm_(1e9) for net in (first, second)]
    together = cm.clip_grad_norm_([*first.parameters(), *second.parameters()], 1e9)
    return together.item(), torch.stack(alone).norm().item()


def test_networks_on_two_meshes_are_clipped_together(pools: Pools) -> None:
    for together, expected in pools[2].run(two_networks):
        assert together == pytest.approx(expected, rel=1e-12)


def scaled(mesh: Mesh, reduction: str) -> tuple[float, bool]:
    """An overflow on the last rank alone; the scaler is made as torch's is."""
    net, args = parallel(mesh, reduction)
    scaler = cm.GradScaler(init_scale=2.0**10)
    optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
    before = net.full_state_dict()
    scaler.scale(net(*args)).backward()
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if net.mesh.rank == net.mesh.mesh.size - 1:
        for parameter in held[:1]:
            getattr(parameter.grad, "_local_tensor", parameter.grad).view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    after = net.full_state_dict()
    return scaler.get_scale(), all(torch.equal(after[n], v) for n, v in before.items())


@pytest.mark.parametrize(("mesh", "reduction"), [CASES[1], CASES[3], CASES[4]], ids=str)
def test_a_scaler_finds_its_mesh(pools: Pools, mesh: Mesh, reduction: str) -> None:
    assert pools[mesh.size].run(scaled, mesh, reduction) == [(512.0, True)] * mesh.size


def cut_alone() -> tuple[float, float]:
    """Weights cut without a network: the cut ones know their mesh, and the others go with them."""
    mesh = opened(Mesh(filter=2))
    whole, (x, target) = model(), batch()
    nn.functional.mse_loss(whole(x), target).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item()
    twin = model()
    cm.cut_channels(twin, SHAPE, mesh)
    loss: Any = nn.functional.mse_loss(twin(cm.shard(x, mesh, {})), target)
    loss.backward()
    return cm.clip_grad_norm_(twin.parameters(), 0.1).item(), expected


def test_cut_weights_know_their_mesh(pools: Pools) -> None:
    for norm, expected in pools[2].run(cut_alone):
        assert norm == pytest.approx(expected, rel=1e-10)


def test_a_plan_from_a_file_has_its_mesh(tmp_path: Path) -> None:
    planned = cm.plan(model(), SHAPE, Mesh(data=2), "data")
    planned.save(tmp_path / "plan.toml")
    bound = cm.plan(model(), SHAPE, strategy=cm.load_plan(tmp_path / "plan.toml"))
    assert (bound.mesh, bound.shapes) == (planned.mesh, planned.shapes)


def test_unknown_parameters_are_refused_with_a_way_out() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(LayoutError, match=r"no parallelized network.*net\.clip_grad_norm_.*mesh="):
        cm.clip_grad_norm_([weight], 1.0)
    with pytest.raises(LayoutError, match=r"=0 of them"):
        cm.clip_grad_norm_([], 1.0)
    scaler = cm.GradScaler("cpu")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(LayoutError, match=r"net\.optimizer"):
        scaler.step(optimizer)


def plain_optimizer_on_shards() -> str:
    net, args = parallel(Mesh(data=2), "sharded")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(*args).backward()
    with pytest.raises(UnsupportedError) as caught:
        optimizer.step()
    net._running.reducer.close()
    return str(caught.value)


def test_an_ordinary_optimiser_on_sharded_gradients_is_refused(pools: Pools) -> None:
    for message in pools[2].run(plain_optimizer_on_shards):
        assert "net.optimizer(AdamW" in message
