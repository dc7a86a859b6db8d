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
from benchmarks.slow_down import SlowDown
from benchmarks.timing import machine
from convmesh import models
from convmesh.testing import run_ranks

FACTOR = 3.0
"""How much slower the last rank becomes."""

BLOCK, OTHERS = 12, 4
"""Steps that the balanced network and its rivals make in turn: equal shares have a rate, balanced ones a history."""

ROUNDS_BEFORE = 3
"""Rounds of the first half, in which all ranks have their full speed."""


@dataclass(frozen=True)
class Case:
    """What is trained: the mesh's axis decides what is dealt."""

    title: str
    axis: str
    samples: int
    extent: int


CASES = {
    "data": Case("samples of a batch (cosmoflow, {samples} × 32³)", "data", 24, 32),
    "depth": Case("slabs of a volume (cosmoflow, 4 × {extent}³, cut in depth)", "depth", 4, 64),
}
"""`samples` a rank where samples are dealt, in all where space is."""


@dataclass
class Rival:
    """A network that trains, and the seconds of its steps."""

    step: Callable[[], None]
    slow_down: SlowDown
    balancer: cm.Balancer | None = None
    before: list[float] = field(default_factory=list)
    """In the first half."""
    full: list[float] = field(default_factory=list)
    """In the second half, with the slow-down lifted: what the machine gives at that time."""
    slow: list[float] = field(default_factory=list)


def rival(case: Case, ranks: int, is_balanced: bool) -> Rival:
    torch.manual_seed(0)
    samples = case.samples * (ranks if case.axis == "data" else 1)
    model = models.create("cosmoflow", channels=1, outputs=2, extent=case.extent, layers=4, width=0.5, dropout=0.0)
    x, target = torch.randn(samples, 1, *[case.extent] * 3), torch.rand(samples, 2)
    plan = cm.plan(model, x, cm.Mesh(**{case.axis: ranks}), "data" if case.axis == "data" else "spatial")
    slow_down = SlowDown(F.mse_loss)
    slow_down.watch(model)  # before the gradients' sums do
    net = cm.parallelize(model, plan, loss=slow_down)
    optimizer = net.optimizer(torch.optim.SGD, lr=1e-4)
    balancer = cm.Balancer(net) if is_balanced else None
    shards: dict[Any, Any] = {}

    def step() -> None:
        if net.mesh.mesh not in shards:
            shards[net.mesh.mesh] = net.shard_input(x), net.shard_target(target)
        with balancer.step() if balancer is not None else nullcontext():
            slow_down.begin()
            net(*shards[net.mesh.mesh]).backward()
            optimizer.step()
            optimizer.zero_grad()
            slow_down.burn()

    return Rival(step, slow_down, balancer)


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


def slowed(each: Rival, factor: float, steps: int) -> list[float]:
    """Seconds of steps with the last rank slowed down."""
    each.slow_down.factor = factor if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    return timed(each.step, steps)


def measure(name: str, steps: int) -> tuple[list[list[float]], list[str]]:
    """Seconds of steps, equal and balanced, before and after the last rank slowed down; the moves.

    In every round of the second half the equal shares run at full speed too: the machine may not be what it was.
    """
    ranks = dist.get_world_size()
    equal, balanced = (rival(CASES[name], ranks, is_balanced) for is_balanced in (False, True))
    for each in (equal, balanced):
        timed(each.step, 2)
    for _ in range(ROUNDS_BEFORE):
        equal.before += timed(equal.step, OTHERS)
        balanced.before += timed(balanced.step, BLOCK)
    while len(balanced.slow) < steps:
        equal.full += slowed(equal, 1.0, OTHERS)
        equal.slow += slowed(equal, FACTOR, OTHERS)
        balanced.slow += slowed(balanced, FACTOR, BLOCK)
    assert balanced.balancer is not None
    found = [equal.before, balanced.before, equal.full, equal.slow, balanced.slow]
    return found, [move.text for move in balanced.balancer.moves]


def report(name: str, ranks: int, steps: int) -> str:
    found, moves = run_ranks(ranks, measure, name, steps, seconds_timeout=3600)[0]
    before, before_balanced, full, equal, balanced = found
    ideal = mean(full) * ranks / (ranks - 1 + 1 / FACTOR)
    late = balanced[len(balanced) // 3 :]
    rows = [
        ("first half: equal shares", mean(before), ""),
        ("first half: balanced", mean(before_balanced), ""),
        ("second half, slow-down lifted: equal shares", mean(full), ""),
        ("second half: ideal for the summed speed", ideal, "100%"),
        ("second half: equal shares", mean(equal), f"{ideal / mean(equal):.0%}"),
        (f"second half: balanced, all {len(balanced)} steps", mean(balanced), f"{ideal / mean(balanced):.0%}"),
        (f"second half: balanced, the last {len(late)} of them", mean(late), f"{ideal / mean(late):.0%}"),
    ]
    case = CASES[name]
    title = case.title.format(samples=case.samples * ranks, extent=case.extent)
    lines = [f"### {title}, {ranks} ranks", "", "| | ms a step | throughput against the ideal |", "| --- | --- | --- |"]
    lines += [f"| {what} | {1e3 * seconds:.0f} | {share} |" for what, seconds, share in rows]
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
