"""`data` on two ranks beside DDP, in the same two processes and in alternation.

python -m benchmarks.gpu_step.ranks [CASE] [--out FILE.json]

Both ranks use the first GPU, which NCCL from 2.30 on allows with NCCL_MULTI_RANK_GPU_ENABLE=1, under MPS.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import convmesh as cm
from benchmarks.gpu_step.cases import CASES, DEVICE, Case
from benchmarks.gpu_step.trainings import Step, training
from convmesh.dist.barriers import wait_for_all

RANKS = 2
STEPS_BEFORE = 6
BLOCKS, STEPS_BLOCK = 9, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", default="resnet50", choices=[*CASES])
    parser.add_argument("--out", type=Path, default=Path("gpu_ranks.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (f"{folder}/store", options.case, options.out), nprocs=RANKS)
    print(options.out.read_text())


def _rank(rank: int, store: str, name: str, out: Path) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.backends.cudnn.benchmark = True
    steps = {rival: make(CASES[name], rank) for rival, make in RIVALS.items()}
    seconds: dict[str, list[float]] = {rival: [] for rival in steps}
    for step in steps.values():
        _timed(step, STEPS_BEFORE)
    for _ in range(BLOCKS):
        for rival, step in steps.items():
            seconds[rival].append(_timed(step, STEPS_BLOCK))
    if rank == 0:
        rows = {rival: {"seconds": statistics.median(found), "blocks": found} for rival, found in seconds.items()}
        about = {"date": str(datetime.date.today()), "device": torch.cuda.get_device_name(), "torch": torch.__version__}
        out.write_text(json.dumps({"case": name, "about": about, "rivals": rows}, indent=1))


def _timed(step: Step, count: int) -> float:
    wait_for_all()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def _ddp(case: Case, rank: int, mode: str | None) -> Step:
    model = DistributedDataParallel(case.create(last=True), device_ids=[0], gradient_as_bucket_view=True)
    run: Callable[..., Any] = model if mode is None else torch.compile(model, mode=None if mode == "default" else mode)
    x, target = (part.chunk(RANKS)[rank].contiguous() for part in case.batch(last=False))
    x, loss = x.contiguous(memory_format=case.order(True)), case.loss()
    return _step(case, model, lambda: loss(run(x), target))


def _ours(case: Case, rank: int, compiling: bool) -> Step:
    del rank
    model = case.create(last=True)
    plan = cm.plan(model, case.shape, cm.Mesh(data=RANKS), "data", batchnorm="replica")
    net = cm.parallelize(model, plan, loss=case.loss(), compile=compiling, mesh=cm.open_mesh(plan.mesh, device=DEVICE))
    x, target = case.batch(last=True)
    args = net.shard_input(x), net.shard_target(target)
    return _step(case, net, lambda: net(*args))


def _step(case: Case, net: nn.Module, loss_of: Step) -> Step:
    return training(case, list(net.parameters()), loss_of).step


RIVALS: dict[str, Callable[[Case, int], Step]] = {
    "DDP": partial(_ddp, mode=None),
    "DDP compile": partial(_ddp, mode="default"),
    "DDP reduce-overhead": partial(_ddp, mode="reduce-overhead"),
    "ConvMesh eager": partial(_ours, compiling=False),
    "ConvMesh compile": partial(_ours, compiling=True),
}

if __name__ == "__main__":
    main()
