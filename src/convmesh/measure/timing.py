"""Timing what several ranks do together."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from convmesh.dist import OpenMesh
from convmesh.dist.collectives import all_reduce

LEAST_REPEATS, MOST_REPEATS = 5, 120
SQUARE, ROWS = 256, 8192
"""Of the matrices that are computed with in between: a few milliseconds of a core, as layers take, and more memory than
its caches hold."""
AXES = ("filter",)
"""The mesh axis that transfers are measured along; the groups along it work side by side."""
OTHERS = ("data",)


@dataclass(frozen=True, slots=True)
class Spell:
    """What several measurements say, and how far apart the inner half of them is, as a fraction."""

    seconds: float
    spread: float


def together(mesh: OpenMesh, call: Callable[[], object], seconds: float) -> Spell:
    """What `call` takes ranks that computed before it, as in a network; the same on all ranks.

    One call right after another would find threads and connections awake, their code at hand, and cores whose turn it
    is not yet over: it would take a third of the time. Ranks that do the same do not end it at the
    same moment, and the mean of a group's ranks has what they wait for the last of them. Of several groups the slowest
    counts.
    """
    work = _layer(mesh)
    once = slowest(mesh, _elapsed(mesh, lambda: (work(), call())))
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(seconds / once)))
    meet(mesh)
    times = torch.tensor([_after_work(mesh, work, call) for _ in range(repeats)], dtype=torch.float64)
    times = all_reduce(times.to(mesh.device), mesh, AXES) / mesh.mesh.extent(AXES)
    return mean_spell(all_reduce(times, mesh, OTHERS, dist.ReduceOp.MAX).tolist())


def _layer(mesh: OpenMesh) -> Callable[[], object]:
    """Computes about as long as a layer does; where ranks take turns on cores, for less than a turn, since what they
    wait for each other's turns is priced with their computations."""
    square = torch.ones(SQUARE, SQUARE, device=mesh.device)
    if mesh.device.type == "cpu" and mesh.mesh.size > len(os.sched_getaffinity(0)):
        return lambda: torch.mm(square, square)
    rows = torch.ones(ROWS, SQUARE, device=mesh.device)
    return lambda: torch.mm(rows.add_(1)[: 2 * SQUARE], square)


def _after_work(mesh: OpenMesh, work: Callable[[], object], call: Callable[[], object]) -> float:
    work()
    finish(mesh)
    begun = time.perf_counter()
    call()
    finish(mesh)
    return time.perf_counter() - begun


def one_by_one(mesh: OpenMesh, call: Callable[[], object], seconds: float) -> Spell:
    """From when the last rank begins to when the last has ended, by the host's clock; ranks meet before each."""
    repeats = max(3, min(MOST_REPEATS, int(seconds / slowest(mesh, _elapsed(mesh, call)) / 2)))
    found = []
    for _ in range(repeats):
        meet(mesh)
        begun = time.perf_counter()
        call()
        finish(mesh)
        ended = time.perf_counter()
        found.append(max(1e-7, slowest(mesh, ended) - slowest(mesh, begun)))
    return spell(found)


def spell(found: list[float]) -> Spell:
    """Of measurements of the same thing."""
    middle = statistics.median(found)
    low, high = sorted(found)[len(found) // 4], sorted(found)[-1 - len(found) // 4]
    return Spell(middle, (high - low) / 2 / middle)


def mean_spell(found: list[float]) -> Spell:
    """The mean, because a step sums over many of them, some of which wait for their turn on a core; the longest few,
    which are somebody else's doing, are left out: of few, one can be a hundred times as long as the others."""
    kept = sorted(found)[: len(found) - max(1, len(found) // 10)]
    return Spell(statistics.fmean(kept), spell(found).spread)


def slowest(mesh: OpenMesh, seconds: float) -> float:
    """The largest of the ranks' values."""
    value = torch.tensor([seconds], dtype=torch.float64, device=mesh.device)
    return float(all_reduce(value, mesh, tuple(mesh.mesh.axes), dist.ReduceOp.MAX))


def meet(mesh: OpenMesh) -> None:
    """Wait for all ranks."""
    slowest(mesh, 0.0)


def _elapsed(mesh: OpenMesh, call: Callable[[], object]) -> float:
    meet(mesh)
    begun = time.perf_counter()
    call()
    finish(mesh)
    return time.perf_counter() - begun


def finish(mesh: OpenMesh) -> None:
    """Wait for all that this rank's device was asked to do."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
