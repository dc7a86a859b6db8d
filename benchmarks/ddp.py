"""A data-parallel step compared with torch's DistributedDataParallel: same model, same batch, same statistics.

Every rival has its own two processes, which wait while the others run: what ConvMesh changes in a process (it keeps
freed memory) must not help or hurt its rivals.

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
from convmesh.dist.heap import keep_freed_memory
from convmesh.plans.plan import BatchNorm
from convmesh.testing import run_ranks

REPEATS = 25
Draw = Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor, Any]]


def resnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
    """resnet18 as published, 16 images of 64×64."""
    return models.create("resnet18"), torch.randn(16, 3, 64, 64), torch.randint(0, 1000, (16,)), F.cross_entropy


def cosmoflow() -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
    """cosmoflow with batch norm, 4 volumes of 32³."""
    model = models.create("cosmoflow", extent=32, norm="batch")
    return model, torch.randn(4, 4, 32, 32, 32), torch.rand(4, 4), F.mse_loss


NETWORKS: dict[str, Draw] = {"resnet18, 16 × 64×64": resnet, "cosmoflow, 4 × 32³": cosmoflow}


def step(loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """One whole training step."""
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step()


def torch_ddp(draw: Draw, pair: list[int], **options: Any) -> Step:
    """The step with torch's own data parallelism, on this rank's half of the batch."""
    torch.manual_seed(0)
    model, x, target, loss = draw()
    group = dist.new_group(pair, use_local_synchronization=True)
    net = DistributedDataParallel(model, process_group=group, **options)
    half, goal = x.chunk(2)[dist.get_rank(group)], target.chunk(2)[dist.get_rank(group)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    return partial(step, lambda: loss(net(half), goal), optimizer)


def keeping_ddp(draw: Draw, pair: list[int]) -> Step:
    """DDP in processes that keep freed memory, as ConvMesh's do, to compare the runtimes alone."""
    keep_freed_memory()
    return torch_ddp(draw, pair)


def convmesh(
    draw: Draw, pair: list[int], axis: str = "data", strategy: str = "data", batchnorm: BatchNorm = "replica"
) -> Step:
    """The same step with the `data` preset and statistics per replica, as in DDP; or with another preset."""
    torch.manual_seed(0)
    model, x, target, loss = draw()
    plan = cm.plan(model, x, cm.Mesh(**{axis: 2}), strategy, batchnorm=batchnorm)
    net = cm.parallelize(model, plan, loss=loss, mesh=cm.open_mesh(plan.mesh, ranks=pair))
    half, goal = net.shard_input(x), net.shard_target(target)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    return partial(step, lambda: net(half, goal), optimizer)


RIVALS: dict[str, Callable[[Draw, list[int]], Step]] = {
    "DDP": torch_ddp,
    "DDP, gradient_as_bucket_view": partial(torch_ddp, gradient_as_bucket_view=True),
    "DDP, freed memory kept": keeping_ddp,
    "ConvMesh, data": convmesh,
}


def measure(name: str) -> dict[str, list[float]]:
    steps: dict[str, Step] = dict.fromkeys(RIVALS, _wait)
    for place, (rival, make) in enumerate(RIVALS.items()):
        pair = [2 * place, 2 * place + 1]
        if dist.get_rank() in pair:
            steps[rival] = make(NETWORKS[name], pair)
        dist.barrier()
    return interleave(steps, REPEATS)


def _wait() -> None:
    """The step of a process while another rival runs."""


def main() -> None:
    print(f"{datetime.date.today()}, {machine()}, 2 ranks × 1 thread over Gloo; command: `python -m benchmarks.ddp`\n")
    for name in sys.argv[1:] or NETWORKS:
        seconds = run_ranks(2 * len(RIVALS), measure, name, seconds_timeout=600)[0]
        print(f"### {name}\n\n{table(seconds, 'DDP')}\n", flush=True)


if __name__ == "__main__":
    main()
