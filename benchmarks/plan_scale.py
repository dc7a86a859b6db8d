"""Time to plan, lower and parallelize large networks for large meshes, on one core without processes.

python -m benchmarks.plan_scale            prints the table of benchmarks/plan_scale.md
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from benchmarks.timing import machine
from convmesh import Mesh, models

IMAGES = (8192, 3, 224, 224)


def thousand_layers() -> nn.Module:
    """1,000 convolutions of different widths, so that few layers are alike."""
    widths = [8 + (i * 7) % 61 for i in range(1001)]
    return nn.Sequential(*(nn.Conv2d(c, f, 3, padding=1) for c, f in itertools.pairwise(widths)))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Mesh, str]] = {
    "resnet152 on 4,096": (lambda: models.create("resnet152"), IMAGES, Mesh(data=4096), "data"),
    "resnet152 on 256×4×4": (
        lambda: models.create("resnet152"), IMAGES, Mesh(data=256, height=4, width=4), "data+spatial",
    ),
    "resnet152 on 512×8 filters": (
        lambda: models.create("resnet152"), IMAGES, Mesh(data=512, filter=8), "data+filter",
    ),
    "1,000 different layers on 64×8×8": (
        thousand_layers, (512, 8, 512, 512), Mesh(data=64, height=8, width=8), "data+spatial",
    ),
    "cosmoflow-512 on 64×8×8×16": (
        lambda: models.create("cosmoflow-512"), (64, 4, 512, 512, 512), Mesh(data=64, depth=16, height=8, width=8),
        "data+spatial",
    ),
}  # fmt: skip


def measure(name: str, answers: Any) -> None:
    """Seconds to plan and to parallelize on a fake process group, and the peak of resident memory, in MiB."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    make, shape, mesh, strategy = CASES[name]
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=mesh.size)
    model = make()
    begin = time.perf_counter()
    plan = cm.plan(model, shape, mesh, strategy)
    planned = time.perf_counter()
    cm.parallelize(model, plan, loss=F.cross_entropy)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answers.put((planned - begin, done - planned, peak))


def alone(name: str) -> tuple[float, float, float]:
    """Measure in a separate process, so that the memory is this case's alone."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=measure, args=(name, answers))
    process.start()
    result: tuple[float, float, float] = answers.get()
    process.join()
    return result


def main() -> None:
    print(f"{datetime.date.today()}, {machine()}, one thread; command: `python -m benchmarks.plan_scale`\n")
    print("| network and mesh | `cm.plan` s | `cm.parallelize` s | peak memory MiB |\n| --- | --- | --- | --- |")
    for name in CASES:
        plan, parallelize, peak = alone(name)
        print(f"| {name} | {plan:.1f} | {parallelize:.1f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
