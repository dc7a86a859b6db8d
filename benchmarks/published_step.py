"""Training steps of a published 2D network on two CPU ranks: `data` against DDP, `spatial` against one process.

python -m benchmarks.published_step [BATCH …]     prints the tables of benchmarks/published_step.md

The network is segmentation-models-pytorch's FPN with a resnet18 encoder, on images of 128×128; it needs that package.
Every rival has its own two processes, which wait while the others run. Besides wall time, which other work on the
machine disturbs, the table has the CPU time of both ranks.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.ddp import Draw, convmesh, step, torch_ddp
from benchmarks.networks.factories import called
from benchmarks.timing import Step, machine
from convmesh.testing import run_ranks

ROUNDS, WARMUPS, BATCHES, EXTENT, CLASSES = 12, 2, (4, 8), 128, 4


def fpn(batch: int) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
    """The network without pretrained weights, a batch and its classes."""
    encoder = {"encoder_name": "resnet18", "encoder_weights": None}
    model = called("segmentation_models_pytorch", "FPN", classes=CLASSES, **encoder)()
    x, target = torch.randn(batch, 3, EXTENT, EXTENT), torch.randint(0, CLASSES, (batch, EXTENT, EXTENT))
    return model, x, target, F.cross_entropy


def alone(draw: Draw, pair: list[int]) -> Step:
    """The step of one process with one thread; the second waits."""
    if dist.get_rank() != pair[0]:
        return lambda: None
    torch.manual_seed(0)
    model, x, target, loss = draw()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    return partial(step, lambda: loss(model(x), target), optimizer)


RIVALS: dict[str, Callable[[Draw, list[int]], Step]] = {
    "DDP": torch_ddp,
    "data, replica statistics": convmesh,
    "data, global statistics": partial(convmesh, batchnorm="global"),
    "1 process × 1 thread": alone,
    "spatial": partial(convmesh, axis="height", strategy="spatial", batchnorm="global"),
}
BASELINES = {"spatial": "1 process × 1 thread"}
"""What a rival is compared with, if not with DDP."""


def measure(batch: int) -> dict[str, list[tuple[float, float]]]:
    """By rival and round: wall seconds of its slower rank, and CPU seconds of both."""
    torch.set_num_threads(1)
    steps: dict[str, Step] = dict.fromkeys(RIVALS, lambda: None)
    for place, (rival, make) in enumerate(RIVALS.items()):
        pair = [2 * place, 2 * place + 1]
        if dist.get_rank() in pair:
            steps[rival] = make(partial(fpn, batch), pair)
        dist.barrier()
    found: dict[str, list[tuple[float, float]]] = {rival: [] for rival in RIVALS}
    for number in range(WARMUPS + ROUNDS):
        for rival, run in steps.items():
            taken = _timed(run)
            if number >= WARMUPS:
                found[rival].append(taken)
    return found


def _timed(run: Step) -> tuple[float, float]:
    dist.barrier()
    wall, busy = time.perf_counter(), time.process_time()
    run()
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - busy], dtype=torch.float64)
    parts = [torch.zeros_like(spent) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, spent)
    walls, busies = torch.stack(parts).T
    return float(walls.max()), float(busies.sum())


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    """Medians, and ratios of paired rounds with their quartiles."""
    rows = [
        "| rival | wall ms | CPU ms | against | wall ratio | CPU ratio |",
        "| --- | ---: | ---: | --- | --- | --- |",
    ]
    for rival, rounds in found.items():
        baseline = BASELINES.get(rival, "DDP")
        medians = [1e3 * statistics.median(column) for column in zip(*rounds, strict=True)]
        pairs = zip(rounds, found[baseline], strict=True)
        ratios = [[a / b for a, b in zip(mine, other, strict=True)] for mine, other in pairs]
        texts = (_spread(list(column)) for column in zip(*ratios, strict=True))
        rows.append(f"| {rival} | {medians[0]:.1f} | {medians[1]:.1f} | {baseline} | {' | '.join(texts)} |")
    return "\n".join(rows)


def _spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    print(f"{datetime.date.today()}, {machine()}, 2 ranks × 1 thread over Gloo and lines\n")
    for batch in map(int, sys.argv[1:] or BATCHES):
        found = run_ranks(2 * len(RIVALS), measure, batch, seconds_timeout=900)[0]
        print(f"### {batch} images\n\n{table(found)}\n", flush=True)


if __name__ == "__main__":
    main()
