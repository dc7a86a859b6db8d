"""Batch statistics within one data-parallel replica, as in DDP."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import convmesh as cm
from convmesh import Mesh
from tests.conftest import Pools
from tests.runtime.training import fresh


def replica_statistics(kind: str) -> dict[str, torch.Tensor]:
    """Weights after three steps with statistics of each rank's own samples."""
    made, x, target, loss_of = fresh("resnet18")
    rank = torch.distributed.get_rank()
    if kind == "ddp":
        runner: Any = DistributedDataParallel(made)
        args = x.chunk(2)[rank], target.chunk(2)[rank]
    else:
        runner = cm.parallelize(made, cm.plan(made, x, Mesh(data=2), "data", batchnorm="replica"), loss=loss_of)
        args = runner.shard_input(x), runner.shard_target(target)
    opt = torch.optim.SGD(runner.parameters(), lr=0.01)
    for _ in range(3):
        opt.zero_grad()
        loss = loss_of(runner(args[0]), args[1]) if kind == "ddp" else runner(*args)
        loss.backward()
        opt.step()
    return {n: v.detach().clone() for n, v in made.state_dict().items()}


def replica_state() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The full state after a step, and the output of evaluation."""
    made, x, target, loss_of = fresh("resnet18")
    runner = cm.parallelize(made, cm.plan(made, x, Mesh(data=2), "data", batchnorm="replica"), loss=loss_of)
    runner(runner.shard_input(x), runner.shard_target(target))
    with torch.no_grad():
        y = runner.eval().gather_output(runner(runner.shard_input(x)))
    return runner.full_state_dict(), y


def test_replicas_evaluate_and_save_with_the_first_ones_statistics(pools: Pools) -> None:
    (state, y), (state_of_second, y_of_second) = pools[2].run(replica_state)
    assert all(torch.equal(value, state_of_second[name]) for name, value in state.items())
    assert torch.equal(y, y_of_second)


def test_replica_statistics_are_those_of_ddp(pools: Pools) -> None:
    torches, ours = (pools[2].run(replica_statistics, kind) for kind in ("ddp", "ours"))
    for expected, found in zip(torches, ours, strict=True):
        weights = {n: v for n, v in expected.items() if "running" not in n}
        torch.testing.assert_close({n: found[n] for n in weights}, weights, rtol=1e-9, atol=1e-11)
