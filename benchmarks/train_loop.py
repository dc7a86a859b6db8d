"""What the training loop adds to the bare step: the same network, batch and optimiser, with and without the loop.

python -m benchmarks.train_loop     prints the tables of benchmarks/train_loop.md
"""

from __future__ import annotations

import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import convmesh as cm
from benchmarks.timing import Step, interleave, machine, table
from convmesh import models
from convmesh.testing import run_ranks
from convmesh.train.hooks import Metrics
from convmesh.train.loop import Hook, Run, train
from convmesh.train.progress_line import ProgressLine
from convmesh.train.run_config import ScheduleConfig
from convmesh.train.run_folder import RunFolder
from convmesh.train.schedules import Schedule
from convmesh.train.step_record import Progress
from convmesh.train.stepping import Stepper
from convmesh.train.stopping import Stopping

ROUNDS = 40

EMPTY_STEPS = 200

NETWORKS: dict[str, Any] = {
    "lenet5, 64 × 32²": (lambda: models.create("lenet5"), (64, 1, 32, 32), "class", 30),
    "cosmoflow, 16 × 32³": (
        lambda: models.create("cosmoflow", channels=1, outputs=2, extent=32, layers=4, width=0.25, dropout=0.0),
        (16, 1, 32, 32, 32),
        "values",
        5,
    ),
}
"""How each is made, its batch, its loss, and how many steps a rival makes in a round: about half a second of them."""


class SameBatch:
    """Data that cost nothing: the loop is measured, not reading."""

    seconds_waiting_total = 0.0

    def __init__(self, shards: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._shards = shards

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        del epoch, start
        while True:
            yield self._shards


def measure(name: str, folder: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds a step of the rivals on two ranks, and this rank's seconds of processor time."""
    create, shape, kind, steps = NETWORKS[name]
    torch.manual_seed(0)
    model, x = create(), torch.randn(shape)
    target, loss = (torch.randint(0, 10, shape[:1]), F.cross_entropy) if kind == "class" else (
        torch.rand(shape[0], 2), F.mse_loss
    )  # fmt: skip
    net = cm.parallelize(model, cm.plan(model, x, cm.Mesh(data=2), "data"), loss=loss)
    shards = net.shard_input(x), net.shard_target(target)
    optimizer = net.optimizer(torch.optim.SGD, lr=1e-4)

    def bare() -> None:
        for _ in range(steps):
            net(*shards).backward()
            optimizer.step()
            optimizer.zero_grad()

    stepper = Stepper(net, optimizer, factor=Schedule(ScheduleConfig(), 100, 10000))
    done, stopping = Progress(), Stopping(net.mesh)
    run = Run(stepper, SameBatch(shards), 0, 1 << 30, shape[0], done, stopping)
    hooks = _hooks(done, Path(folder)) if net.mesh.rank == 0 else []

    def loop() -> None:
        train(replace(run, steps=done.step + steps), hooks)

    spent: dict[str, list[float]] = {"bare step": [], "loop": []}
    rivals = {"bare step": counting(bare, spent["bare step"]), "loop": counting(loop, spent["loop"])}
    return _a_step(interleave(rivals, ROUNDS), steps), _a_step(spent, steps)


def _a_step(seconds: dict[str, list[float]], steps: int) -> dict[str, list[float]]:
    return {name: [each / steps for each in rounds] for name, rounds in seconds.items()}


def counting(step: Step, spent: list[float]) -> Step:
    """The same step, with the processor time of this process noted: other processes hardly change it."""

    def counted() -> None:
        begin = time.process_time()
        step()
        spent.append(time.process_time() - begin)

    return counted


class EmptyStepper(Stepper):
    """Steps without a network: what is left is the loop."""

    def _backward(self, part: Any, count: int, last: bool) -> torch.Tensor:
        del part, count, last
        return torch.zeros(())

    def _update(self) -> None:
        pass


def alone(folder: str) -> float:
    """Seconds of processor time that the loop itself takes for a step: other processes do not change it much."""
    model, x = models.create("lenet5"), torch.zeros(2, 1, 32, 32)
    net = cm.parallelize(model, cm.plan(model, x, cm.Mesh(), "data"), loss=F.cross_entropy)
    shards = net.shard_input(x), net.shard_target(torch.zeros(2, dtype=torch.int64))
    optimizer = net.optimizer(torch.optim.SGD, lr=1e-4)
    stepper = EmptyStepper(net, optimizer, factor=Schedule(ScheduleConfig(), 100, 10000))
    done = Progress()
    run = Run(stepper, SameBatch(shards), 0, 1 << 30, 2, done, Stopping(net.mesh))
    hooks, rounds = _hooks(done, Path(folder)), []
    for _ in range(ROUNDS):
        begin = time.process_time()
        train(replace(run, steps=done.step + EMPTY_STEPS), hooks)
        rounds.append((time.process_time() - begin) / EMPTY_STEPS)
    return statistics.median(rounds)


def _hooks(done: Progress, path: Path) -> list[Hook]:
    """What the first rank of `convmesh train` does after each step."""
    folder = RunFolder(path, resume=True)
    folder.start_metrics(0)
    return [Metrics(folder, done), ProgressLine(done, 1 << 30, 0.01, folder.log)]


def added(seconds: dict[str, list[float]]) -> float:
    """What the loop adds, as the median over rounds."""
    pairs = zip(seconds["loop"], seconds["bare step"], strict=True)
    return statistics.median(loop / bare - 1 for loop, bare in pairs)


def main() -> None:
    print("# The training loop compared with the bare step\n")
    command = "python -m benchmarks.train_loop"
    print(f"{datetime.date.today()}, {machine()}, 2 ranks × 1 thread over Gloo; command: `{command}`\n")
    with tempfile.TemporaryDirectory() as folder:
        print(f"The loop itself takes {1e6 * run_ranks(1, alone, folder)[0]:.0f} µs of processor time a step.\n")
    for name in NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            seconds, spent = run_ranks(2, measure, name, folder, seconds_timeout=600)[0]
        print(
            f"### {name}\n\n{table(seconds, 'bare step')}\n\nThe loop adds {added(seconds):.1%} to the time of a step,"
        )
        print(f"and {added(spent):.1%} to its processor time.\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
