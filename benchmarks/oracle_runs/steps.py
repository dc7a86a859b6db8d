"""Real training steps, timed on every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

import convmesh as cm
from benchmarks.oracle_runs.cases import Case
from benchmarks.oracle_runs.pace import Sample
from convmesh.testing import RankPool

WARMUPS = 2


def step_seconds(case: Case, steps: int) -> list[float]:
    """On one rank of a mesh: seconds of each step, the first ones left out."""
    model = case.model()
    net = cm.parallelize(model, case.plan(model), loss=case.loss)
    x, target = net.shard_input(torch.randn(case.shape)), net.shard_target(case.target())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    seconds = []
    for _ in range(WARMUPS + steps):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        net(x, target).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return seconds[WARMUPS:]


@dataclass(frozen=True)
class Steps:
    """What a round found of a case."""

    seconds: tuple[float, ...]
    """Of each step, on the rank that took longest."""
    pace: float
    """The mean of before and after them."""


def measure_steps(samples: Mapping[Case, Sample], steps: int, rounds: int) -> Iterator[tuple[Case, Steps]]:
    """Every case's steps, and the pace of its operators beside them; rounds in turn, so that drift hits all alike."""
    by_ranks: dict[int, list[Case]] = {}
    for case in samples:
        by_ranks.setdefault(case.mesh.size, []).append(case)
    for _ in range(rounds):
        for ranks, group in by_ranks.items():
            with RankPool(ranks, seconds_timeout=300) as pool:
                for case in group:
                    yield case, _steps(pool, case, samples[case], steps)


def _steps(pool: RankPool, case: Case, sample: Sample, steps: int) -> Steps:
    before = sample.pace_on(pool)
    seconds = tuple(max(times) for times in zip(*pool.run(step_seconds, case, steps), strict=True))
    return Steps(seconds, statistics.mean([before, sample.pace_on(pool)]))
