"""Timing what several ranks do together."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from convmesh.dist import OpenMesh
from convmesh.dist.collectives import all_reduce

LEAST_REPEATS, MOST_REPEATS = 5, 120
SHAPE = (4, 64, 28, 28)
"""Of what is computed with in between: a layer that takes a core a few milliseconds."""
INPUTS = 12
"""Of that layer, in turn: more memory than a core's caches hold."""
SQUARE = 256
"""Of the matrices that are multiplied in its place where ranks take turns on cores."""
POSTINGS = 40
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
    is not yet over: it would take a third of the time, and after a sum over memory instead of a layer, two thirds.
    Ranks that do the same do not end it at the same moment, now one, now another: what they wait for the last of them
    is in the mean. A rank that is always last has the slowest core, for which operators were timed, and is not waited
    for twice: of a group's ranks the one that waits least counts. Of several groups the slowest does.
    """
    work = _layer(mesh)
    once = slowest(mesh, _elapsed(mesh, lambda: (work(), call())))
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(seconds / once)))
    meet(mesh)
    own = mean_spell([_after_work(mesh, work, call) for _ in range(repeats)])
    found = torch.tensor([own.seconds, own.spread], dtype=torch.float64, device=mesh.device)
    least = all_reduce(found, mesh, AXES, dist.ReduceOp.MIN)
    return Spell(*all_reduce(least, mesh, OTHERS, dist.ReduceOp.MAX).tolist())


def _layer(mesh: OpenMesh) -> Callable[[], object]:
    """Computes as a layer does; where ranks take turns on cores, for less than a turn, since what they wait for each
    other's turns is priced with their computations."""
    if mesh.device.type == "cpu" and mesh.mesh.size > len(os.sched_getaffinity(0)):
        square = torch.ones(SQUARE, SQUARE)
        return lambda: torch.mm(square, square)
    channels = SHAPE[1]
    layer = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
    layer.to(mesh.device).requires_grad_(False)
    inputs = itertools.cycle([torch.randn(SHAPE, device=mesh.device) for _ in range(INPUTS)])
    return lambda: layer(next(inputs))


def posting(mesh: OpenMesh, call: Callable[[], object]) -> float:
    """What `call` takes this rank's own thread, which does not wait; the least of the ranks'."""
    found = []
    for _ in range(POSTINGS):
        begun = time.thread_time()
        call()
        found.append(time.thread_time() - begun)
    own = torch.tensor([statistics.median(found)], dtype=torch.float64)
    return float(all_reduce(own, mesh, tuple(mesh.mesh.axes), dist.ReduceOp.MIN))


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
