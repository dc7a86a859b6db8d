"""One of several ranks becomes three times slower half-way: shares that follow the speed against equal ones.

python -m benchmarks.balance [--ranks N] [--steps N]     prints the tables of benchmarks/balance.md
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import convmesh as cm
from benchmarks.slow_down import slowed
from benchmarks.timing import machine
from convmesh import models
from convmesh.testing import run_ranks

FACTOR = 3.0
"""How much slower the last rank becomes."""

BLOCK, OTHERS = 12, 4
"""Steps that the balanced network and its rivals make in turn: equal shares have a rate, balanced ones a history."""


@dataclass(frozen=True)
class Case:
    """What is trained: the mesh's axis decides what is dealt."""

    title: str
    axis: str
    samples: int
    extent: int


CASES = {
    "data": Case("samples of a batch (cosmoflow, {samples} × 32³)", "data", 8, 32),
    "depth": Case("slabs of a volume (cosmoflow, 2 × {extent}³, cut in depth)", "depth", 2, 64),
}
"""`samples` a rank where samples are dealt, in all where space is."""


@dataclass
class Rival:
    """A network that trains, and the seconds of its steps."""

    step: Callable[[], None]
    balancer: cm.Balancer | None = None
    full: list[float] = field(default_factory=list)
    slow: list[float] = field(default_factory=list)


def rival(case: Case, ranks: int, is_balanced: bool) -> Rival:
    torch.manual_seed(0)
    samples = case.samples * (ranks if case.axis == "data" else 1)
    model = models.create("cosmoflow", channels=1, outputs=2, extent=case.extent, layers=4, width=0.25, dropout=0.0)
    x, target = torch.randn(samples, 1, *[case.extent] * 3), torch.rand(samples, 2)
    plan = cm.plan(model, x, cm.Mesh(**{case.axis: ranks}), "data" if case.axis == "data" else "spatial")
    net = cm.parallelize(model, plan, loss=F.mse_loss)
    optimizer = net.optimizer(torch.optim.SGD, lr=1e-4)
    balancer = cm.Balancer(net) if is_balanced else None
    shards: dict[Any, Any] = {}

    def step() -> None:
        if net.mesh.mesh not in shards:
            shards[net.mesh.mesh] = net.shard_input(x), net.shard_target(target)
        with balancer.step() if balancer is not None else nullcontext():
            net(*shards[net.mesh.mesh]).backward()
            optimizer.step()
            optimizer.zero_grad()

    return Rival(step, balancer)


def timed(step: Callable[[], None], steps: int) -> list[float]:
    """Seconds of steps, all ranks together."""
    seconds = []
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def measure(name: str, steps: int) -> tuple[list[list[float]], list[str]]:
    """Seconds of steps, equal and balanced, at full speed and after the last rank slowed down; the moves."""
    ranks = dist.get_world_size()
    equal, balanced = (rival(CASES[name], ranks, is_balanced) for is_balanced in (False, True))
    for each in (equal, balanced):
        timed(each.step, 2)
    for _ in range(3):
        equal.full += timed(equal.step, OTHERS)
        balanced.full += timed(balanced.step, BLOCK)
    with slowed(FACTOR) if dist.get_rank() == ranks - 1 else nullcontext():
        while len(balanced.slow) < steps:
            equal.slow += timed(equal.step, OTHERS)
            balanced.slow += timed(balanced.step, BLOCK)
        dist.barrier()
    assert balanced.balancer is not None
    return [equal.full, balanced.full, equal.slow, balanced.slow], [move.text for move in balanced.balancer.moves]


def report(name: str, ranks: int, steps: int) -> str:
    (full, full_balanced, equal, balanced), moves = run_ranks(ranks, measure, name, steps, seconds_timeout=3600)[0]
    case = CASES[name]
    ideal = mean(full) * ranks / (ranks - 1 + 1 / FACTOR)
    late = balanced[len(balanced) // 3 :]
    rows = [
        ("equal shares, all ranks at full speed", mean(full)),
        ("balanced, all ranks at full speed", mean(full_balanced)),
        ("ideal for the summed speed", ideal),
        ("equal shares, one rank slowed", mean(equal)),
        (f"balanced, all {len(balanced)} steps after the slow-down", mean(balanced)),
        (f"balanced, the last {len(late)} of them", mean(late)),
    ]
    title = case.title.format(samples=case.samples * ranks, extent=case.extent)
    lines = [f"### {title}, {ranks} ranks", "", "| | ms a step | throughput against the ideal |", "| --- | --- | --- |"]
    lines += [f"| {what} | {1e3 * seconds:.0f} | {ideal / seconds:.0%} |" for what, seconds in rows]
    return "\n".join([*lines, "", *(f"- {move}" for move in moves), ""])


def mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120, help="after the slow-down")
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=[*CASES])
    given = parser.parse_args()
    print("# Shares that follow the ranks' speed\n")
    command = f"python -m benchmarks.balance --ranks {given.ranks} --steps {given.steps}"
    print(f"{datetime.date.today()}, {machine()}, {given.ranks} ranks × 1 thread over Gloo; command: `{command}`\n")
    for name in given.cases:
        print(report(name, given.ranks, given.steps))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
