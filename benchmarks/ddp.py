"""A data-parallel step beside torch's DistributedDataParallel: same model, same batch, same statistics.

python -m benchmarks.ddp            prints the tables of benchmarks/ddp.md
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import convmesh as cm
from benchmarks.timing import Step, interleave, machine, table
from convmesh import models
from convmesh.testing import run_ranks

REPEATS = 25
Draw = Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor, Any]]


def resnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
    """resnet18 as published, 16 images of 64×64."""
    return models.create("resnet18"), torch.randn(16, 3, 64, 64), torch.randint(0, 1000, (16,)), F.cross_entropy


def cosmoflow() -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
    """cosmoflow for volumes of 32³, 4 of them, with batch norm."""
    model = models.create("cosmoflow", extent=32, norm="batch")
    return model, torch.randn(4, 4, 32, 32, 32), torch.rand(4, 4), F.mse_loss


NETWORKS: dict[str, Draw] = {"resnet18, 16 × 64×64": resnet, "cosmoflow, 4 × 32³": cosmoflow}


def step(loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """One whole training step."""
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step()


def torch_ddp(draw: Draw, **options: Any) -> Step:
    """The step with torch's own data parallelism, on this rank's half of the batch."""
    torch.manual_seed(0)
    model, x, target, loss = draw()
    net = DistributedDataParallel(model, **options)
    half, goal = x.chunk(2)[dist.get_rank()], target.chunk(2)[dist.get_rank()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    return partial(step, lambda: loss(net(half), goal), optimizer)


def convmesh(draw: Draw) -> Step:
    """The same step with the `data` preset and statistics of each replica, as DDP has them."""
    torch.manual_seed(0)
    model, x, target, loss = draw()
    net = cm.parallelize(model, cm.plan(model, x, cm.Mesh(data=2), "data", batchnorm="replica"), loss=loss)
    half, goal = net.shard_input(x), net.shard_target(target)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    return partial(step, lambda: net(half, goal), optimizer)


def measure(name: str) -> dict[str, list[float]]:
    draw = NETWORKS[name]
    rivals = {
        "DDP": torch_ddp(draw),
        "DDP, gradient_as_bucket_view": torch_ddp(draw, gradient_as_bucket_view=True),
        "ConvMesh, data": convmesh(draw),
    }
    return interleave(rivals, REPEATS)


def main() -> None:
    print(f"{datetime.date.today()}, {machine()}, 2 ranks × 1 thread over Gloo; command: `python -m benchmarks.ddp`\n")
    for name in sys.argv[1:] or NETWORKS:
        seconds = run_ranks(2, measure, name, seconds_timeout=600)[0]
        print(f"### {name}\n\n{table(seconds, 'DDP')}\n", flush=True)


if __name__ == "__main__":
    main()
