"""One of several ranks becomes three times slower half-way: shares that follow the speed against equal ones.

python -m benchmarks.balance [--ranks N] [--steps N] [--trials N] [--seconds S] [--out FILE]     measures
python -m benchmarks.balance --page FILE     writes the section of benchmarks/balance.md from such a file
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import convmesh as cm
from benchmarks.balance_page import put_on_page
from benchmarks.throttle import throttled
from benchmarks.timing import machine
from convmesh import models
from convmesh.testing import run_ranks

FACTOR = 3.0
"""How much slower the last rank becomes."""

BLOCK, OTHERS = 12, 2
"""Steps that the balanced network and equal shares make in turn: equal shares have a rate, balanced ones a history."""

STEPS_ALONE = 4
"""As long as these take a fast rank, all ranks train alone in every turn."""

SECONDS_TURN = 10.0
"""Of the time limit, kept for the last turn: none begins after that."""


@dataclass(frozen=True)
class Case:
    """What is trained: the mesh's axis decides what is dealt."""

    title: str
    axis: str
    samples: int
    extent: int

    def joined(self, ranks: int) -> tuple[int, int]:
        """Samples and extent of what the ranks train together: volumes that are cut are larger, where that fits."""
        total = self.samples * ranks
        return (total // 8, 2 * self.extent) if self.axis == "depth" and total % 8 == 0 else (total, self.extent)


CASES = {
    "data": Case("samples of a batch (cosmoflow, {samples} × {extent}³)", "data", 16, 32),
    "depth": Case("slabs of a volume (cosmoflow, {samples} × {extent}³, cut in depth)", "depth", 2, 64),
}
"""`samples` a rank."""


@dataclass
class Trial:
    """Seconds of steps in one run; of `alone`, the steps of a whole batch that all ranks make in a second, apart."""

    equal_before: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    alone_before: list[float] = field(default_factory=list)
    equal: list[float] = field(default_factory=list)
    balanced: list[float] = field(default_factory=list)
    alone: list[list[float]] = field(default_factory=list)
    """By turn and rank."""
    moves: list[str] = field(default_factory=list)


class Rival:
    """A network that trains: on all ranks, or on this one alone with a rank's part of the samples."""

    def __init__(self, case: Case, is_alone: bool = False) -> None:
        torch.manual_seed(0)
        ranks = 1 if is_alone else dist.get_world_size()
        samples, extent = (case.samples, case.extent) if is_alone else case.joined(ranks)
        model = models.create("cosmoflow", channels=1, outputs=2, extent=extent, layers=4, width=0.5, dropout=0.0)
        self.x, self.target = torch.randn(samples, 1, *[extent] * 3), torch.rand(samples, 2)
        mesh = cm.Mesh(**{case.axis: ranks})
        plan = cm.plan(model, self.x, mesh, "data" if case.axis == "data" else "spatial")
        opened = cm.open_mesh(mesh, ranks=[dist.get_rank()]) if is_alone else None
        self.net = cm.parallelize(model, plan, loss=F.mse_loss, mesh=opened)
        self.optimizer = self.net.optimizer(torch.optim.SGD, lr=1e-4)
        self.equal_shares = {case.axis: (1,) * ranks}
        self.balancer: cm.Balancer | None = None
        self._shards: dict[Any, Any] = {}

    def begin_again(self) -> None:
        """Equal shares, and nothing measured yet."""
        self.net.set_shares(**self.equal_shares)
        self.balancer = cm.Balancer(self.net)

    def step(self) -> None:
        now = self.net.mesh.mesh
        if now not in self._shards:
            self._shards[now] = self.net.shard_input(self.x), self.net.shard_target(self.target)
        with nullcontext() if self.balancer is None else self.balancer.step():
            self.net(*self._shards[now]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def timed(step: Callable[[], None], steps: int) -> list[float]:
    """Seconds of steps, all ranks together: from one step's end to the next, as in training."""
    dist.barrier()
    at = [time.perf_counter()]
    for _ in range(steps):
        step()
        at.append(time.perf_counter())
    spent = torch.tensor([end - begin for begin, end in pairwise(at)], dtype=torch.float64)
    dist.all_reduce(spent)
    return (spent / dist.get_world_size()).tolist()


def rates_alone(alone: Rival, seconds: float) -> list[float]:
    """By rank: the steps of a whole batch that it would make in a second alone, measured on all at the same time."""
    dist.barrier()
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        alone.step()
        steps += 1
    rates = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    rates[dist.get_rank()] = steps / (time.perf_counter() - begin) / dist.get_world_size()
    dist.all_reduce(rates)
    return rates.tolist()


@dataclass
class Bench:
    """The rivals of a case on this rank."""

    equal: Rival
    balanced: Rival
    alone: Rival
    deadline: float
    seconds_alone: float = 1.0

    def warm_up(self) -> None:
        for each in (self.alone, self.equal, self.balanced):
            timed(each.step, 2)
        self.seconds_alone = STEPS_ALONE * min(timed(self.equal.step, 3))

    def is_over(self) -> bool:
        """By the first rank's clock, on all."""
        over = torch.tensor(float(time.time() > self.deadline))
        dist.broadcast(over, 0)
        return bool(over)

    def trial(self, steps: int) -> Trial:
        """Equal speeds for a while, then the last rank is slowed down; the ways take turns."""
        found = Trial()
        self.balanced.begin_again()
        found.equal_before = timed(self.equal.step, OTHERS)
        found.alone_before = rates_alone(self.alone, self.seconds_alone)
        found.before = timed(self.balanced.step, BLOCK)
        is_slow = dist.get_rank() == dist.get_world_size() - 1
        while len(found.balanced) < steps and not self.is_over():
            with throttled(os.getpid(), FACTOR) if is_slow else nullcontext():
                found.balanced += timed(self.balanced.step, BLOCK)
                found.alone.append(rates_alone(self.alone, self.seconds_alone))
                found.equal += timed(self.equal.step, OTHERS)
                dist.barrier()
        found.moves = [move.text for move in self.balanced.balancer.moves] if self.balanced.balancer else []
        return found


def measure(name: str, steps: int, trials: int, deadline: float) -> list[dict[str, Any]]:
    case = CASES[name]
    bench = Bench(Rival(case), Rival(case), Rival(case, is_alone=True), deadline)
    bench.warm_up()
    found: list[dict[str, Any]] = []
    while len(found) < trials and not bench.is_over():
        found.append(asdict(bench.trial(steps)))
    return found


def results(cases: Sequence[str], ranks: int, steps: int, trials: int, seconds: float) -> dict[str, Any]:
    """What was measured, as the file has it; the time is shared between the cases."""
    began, found = time.time(), {}
    for number, name in enumerate(cases, 1):
        deadline = began + seconds * number / len(cases) - SECONDS_TURN
        done = run_ranks(ranks, measure, name, steps, trials, deadline, seconds_timeout=seconds + 60)[0]
        samples, extent = CASES[name].joined(ranks)
        title = CASES[name].title.format(samples=samples, extent=extent)
        found[name] = {"title": title, "trials": done}
    command = f"python -m benchmarks.balance --ranks {ranks} --steps {steps} --trials {trials} --seconds {seconds:g}"
    return {
        "date": str(datetime.date.today()), "machine": machine(), "ranks": ranks, "factor": FACTOR,
        "command": command, "cases": found,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=96, help="after the slow-down")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for all cases; fewer steps and trials then")
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=[*CASES])
    parser.add_argument("--out", type=Path, default=None, help="file for the results; default: balance-N.json")
    parser.add_argument("--page", type=Path, help="a file of results to put on the page; nothing is measured")
    given = parser.parse_args()
    if given.page:
        print(put_on_page(json.loads(given.page.read_text())))
        return
    out = given.out or Path(f"balance-{given.ranks}.json")
    found = results(given.cases, given.ranks, given.steps, given.trials, given.seconds)
    out.write_text(json.dumps(found) + "\n")
    print(put_on_page(found, is_written=False))


if __name__ == "__main__":
    main()
