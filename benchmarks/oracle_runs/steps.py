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


@dataclass(frozen=True)
class Step:
    """One step on one rank."""

    seconds: float
    seconds_thread: float
    """What the rank's own thread ran on a core; it waits for the rest."""
    seconds_process: float
    """With the threads that send and receive."""


def timed_steps(case: Case, steps: int) -> list[Step]:
    """On one rank of a mesh: each step, the first ones left out."""
    model = case.model()
    net = cm.parallelize(model, case.plan(model), loss=case.loss)
    x, target = net.shard_input(torch.randn(case.shape)), net.shard_target(case.target())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    timed = []
    for _ in range(WARMUPS + steps):
        dist.barrier()
        begin = _clocks()
        optimizer.zero_grad()
        net(x, target).backward()
        optimizer.step()
        timed.append(Step(*(end - start for start, end in zip(begin, _clocks(), strict=True))))
    return timed[WARMUPS:]


def _clocks() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), time.process_time()


@dataclass(frozen=True)
class Steps:
    """What a round found of a case."""

    seconds: tuple[float, ...]
    """Of each step, on the rank that took longest."""
    ranks: tuple[tuple[Step, ...], ...]
    """Of each step every rank's."""
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
    ranks = tuple(zip(*pool.run(timed_steps, case, steps), strict=True))
    seconds = tuple(max(step.seconds for step in together) for together in ranks)
    return Steps(seconds, ranks, statistics.mean([before, sample.pace_on(pool)]))
