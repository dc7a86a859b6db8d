"""An overflow on one rank skips the step on all."""

from typing import Any

import pytest
import torch

from convmesh import Mesh
from convmesh.gradients.clip import clip_grad_norm_
from convmesh.gradients.reduction import GradientReducer
from convmesh.gradients.root_update import BroadcastReducer
from convmesh.gradients.scaler import GradScaler
from convmesh.gradients.scattered import ShardedReducer
from convmesh.gradients.sharded_optimizer import ShardedOptimizer
from convmesh.testing import RankPool, opened
from tests.gradients.partial_nets import MESHES, Towers, assert_same, batches, whole

Pools = dict[int, RankPool]


def setup(mesh: Mesh | None, reduction: str) -> tuple[Towers, Any, torch.amp.GradScaler]:
    net = Towers(None if mesh is None else opened(mesh))
    settings: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
    if mesh is None:
        return net, torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", **settings)
    scaler = GradScaler("cpu", **settings)
    if reduction == "sharded":
        _reducer = ShardedReducer(opened(mesh), net.axes_of())
        return net, ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1), scaler
    if reduction == "broadcast":
        net.reducer = BroadcastReducer(opened(mesh), net.axes_of(), net)
    else:
        net.reducer = GradientReducer(opened(mesh), net.axes_of())
    return net, torch.optim.SGD(net.parameters(), lr=0.1), scaler


def trained(mesh: Mesh | None, reduction: str = "bucketed", clips: bool = False) -> tuple[list[float], dict[str, Any]]:
    """Scales after each step and the weights; in the second step the last rank's shard of the gradient overflows."""
    net, optimizer, scaler = setup(mesh, reduction)
    scales = []
    for step, x in enumerate(batches()):
        scaler.scale(net(x)).backward()
        is_last = mesh is None or opened(mesh).rank == mesh.size - 1
        if step == 1 and is_last:
            _overflow(optimizer, net)
        scaler.unscale_(optimizer)
        if clips and mesh is None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        elif clips and mesh is not None:
            clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, {name: whole(p) for name, p in sorted(net.state_dict().items())}


def _overflow(optimizer: Any, net: Towers) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for parameter in held[-1:]:
        grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        grad.view(-1)[-1] = float("inf")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("reduction", ["bucketed", "sharded"])
def test_all_ranks_skip_together(mesh: Mesh, reduction: str, pools: Pools) -> None:
    scales, weights = pools[1].run(trained, None)[0]
    assert scales == [1024.0, 512.0, 512.0, 1024.0]
    for found_scales, found in pools[mesh.size].run(trained, mesh, reduction):
        assert found_scales == scales
        assert_same(found, weights)


def test_clipping_between(pools: Pools) -> None:
    scales, weights = pools[1].run(trained, None, "bucketed", True)[0]
    for found_scales, found in pools[4].run(trained, MESHES[2], "bucketed", True):
        assert found_scales == scales
        assert_same(found, weights)


def overflow_at_the_root() -> tuple[float, bool]:
    """Only the root has gradients; the others must still take part in the decision."""
    net, optimizer, scaler = setup(Mesh(data=2), "broadcast")
    before = [whole(p) for p in net.parameters()]
    scaler.scale(net(batches()[0] * 1e200)).backward()
    if opened(Mesh(data=2)).rank == 0:
        _overflow(optimizer, net)
    scaler.step(optimizer)
    scaler.update()
    unchanged = all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    return scaler.get_scale(), unchanged


def test_ranks_without_gradients_take_part(pools: Pools) -> None:
    assert pools[2].run(overflow_at_the_root) == [(512.0, True)] * 2
