"""How long a checkpoint stops training, how long it takes to write and to load, next to torch's own.

python -m benchmarks.checkpoint            prints the tables of benchmarks/checkpoint.md
"""

from __future__ import annotations

import datetime
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_now

import convmesh as cm
from benchmarks.timing import machine
from convmesh import Checkpointer, models
from convmesh.testing import run_ranks

ROUNDS, RANKS = 5, 2
Finish = Callable[[], object]


@dataclass
class Times:
    """Seconds of the slowest rank: stopped in the call, until all is on the disk, and a training step meanwhile."""

    stall: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    """Processor time of the stop: on a machine with other work it is less than the stop."""
    total: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


class Training:
    """ResNet-50 with AdamW, data-parallel: weights and two states, 307 MB."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = models.create("resnet50")
        self.x, self.target = torch.randn(4, 3, 64, 64), torch.randint(0, 1000, (4,))
        plan = cm.plan(model, self.x, cm.Mesh(data=RANKS), "data")
        self.net = cm.parallelize(model, plan, loss=F.cross_entropy)
        self.optimizer = self.net.optimizer(torch.optim.AdamW, lr=1e-4)
        self.step()

    def step(self) -> None:
        loss = self.net(self.net.shard_input(self.x), self.net.shard_target(self.target))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def slowest(seconds: float) -> float:
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.item()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    begin = time.perf_counter()
    result = call()
    return slowest(time.perf_counter() - begin), result


def convmesh_saver(run: Training, folder: Path) -> Callable[[int], Finish]:
    at = Checkpointer(folder / "convmesh", keep=1)

    def save(step: int) -> Finish:
        at.save(step, run.net, run.optimizer)
        return at.wait

    return save


def states(run: Training) -> dict[str, Any]:
    weights, updates = get_state_dict(run.net, run.optimizer)
    return {"net": weights, "optimizer": updates}


def torch_saver(run: Training, folder: Path) -> Callable[[int], Finish]:
    def save(_: int) -> Finish:
        shutil.rmtree(folder / "torch", ignore_errors=True)
        dist.barrier()
        save_now(states(run), checkpoint_id=folder / "torch")
        return lambda: None

    return save


def torch_async_saver(run: Training, folder: Path) -> Callable[[int], Finish]:
    group = dist.new_group(backend="gloo")

    def save(_: int) -> Finish:
        shutil.rmtree(folder / "torch-async", ignore_errors=True)
        dist.barrier()
        future: Any = async_save(states(run), checkpoint_id=folder / "torch-async", process_group=group)
        return future.result  # type: ignore[no-any-return]

    return save


SAVERS = {
    "ConvMesh": convmesh_saver,
    "torch, dcp.async_save": torch_async_saver,
    "torch, dcp.save": torch_saver,
}


def measure(folder: Path) -> tuple[dict[str, Times], list[float], list[float], int]:
    """Savers in turn, round after round; the first round warms up."""
    run = Training()
    savers = {name: make(run, folder) for name, make in SAVERS.items()}
    times = {name: Times() for name in savers}
    quiet, loads = [], []
    for round_ in range(ROUNDS + 1):
        for name, save in savers.items():
            begin = time.thread_time()
            stall, finish = timed(lambda save=save, round_=round_: save(round_))  # type: ignore[misc]
            busy = slowest(time.thread_time() - begin)
            rest, _ = timed(finish)
            _, again = timed(lambda save=save, round_=round_: save(ROUNDS + 1 + round_))  # type: ignore[misc]
            step, _ = timed(run.step)
            timed(again)
            if round_:
                times[name].stall.append(stall)
                times[name].busy.append(busy)
                times[name].total.append(stall + rest)
                times[name].step.append(step)
        seconds, _ = timed(run.step)
        loading, _ = timed(lambda: Checkpointer(folder / "convmesh").load(run.net, run.optimizer))
        if round_:
            quiet.append(seconds)
            loads.append(loading)
    size = sum(path.stat().st_size for path in (folder / "convmesh").rglob("*.safetensors"))
    return times, quiet, loads, size


def spread(seconds: list[float]) -> str:
    low, middle, high = (1e3 * q for q in statistics.quantiles(seconds, n=4))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        times, quiet, loads, size = run_ranks(RANKS, measure, Path(folder).resolve(), seconds_timeout=1800)[0]
    day = datetime.datetime.now(datetime.UTC).date()
    print(f"{day}, {machine()}, {RANKS} ranks × 1 thread; command: `python -m benchmarks.checkpoint`\n")
    print("| saver | stop, ms | its processor time, ms | on the disk after, ms | stop ÷ all | MB/s | next step, ms |")
    print(f"|{' --- |' * 7}")
    for name, each in times.items():
        share = statistics.median(s / t for s, t in zip(each.stall, each.total, strict=True))
        rate = size / 1e6 / statistics.median(each.total)
        cells = [
            spread(each.stall),
            spread(each.busy),
            spread(each.total),
            f"{share:.1%}",
            f"{rate:.0f}",
            spread(each.step),
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\nA step without a save: {spread(quiet)} ms. {size / 1e6:.0f} MB in {RANKS} files.")
    print(f"Load, digests checked: {spread(loads)} ms, {size / 1e6 / statistics.median(loads):.0f} MB/s.")


if __name__ == "__main__":
    main()
