"""Timing what several ranks do together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from convmesh.dist import OpenMesh
from convmesh.dist.collectives import all_reduce

LEAST_REPEATS, MOST_REPEATS = 5, 40
SQUARE = 256
"""Of the matrix whose product is computed in between: about a millisecond of a core."""
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

    One call right after another would find threads and connections awake. Ranks that do the same do not end it at the
    same moment, and the mean of a group's ranks has what they wait for the last of them. Of several groups the slowest
    counts.
    """
    once = slowest(mesh, _elapsed(mesh, call, 1))
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(seconds / once)))
    square = torch.ones(SQUARE, SQUARE, device=mesh.device)
    meet(mesh)
    times = torch.tensor([_after_work(mesh, square, call) for _ in range(repeats)], dtype=torch.float64)
    times = all_reduce(times.to(mesh.device), mesh, AXES) / mesh.mesh.extent(AXES)
    return mean_spell(all_reduce(times, mesh, OTHERS, dist.ReduceOp.MAX).tolist())


def _after_work(mesh: OpenMesh, square: torch.Tensor, call: Callable[[], object]) -> float:
    torch.mm(square, square)
    finish(mesh)
    begun = time.perf_counter()
    call()
    finish(mesh)
    return time.perf_counter() - begun


def one_by_one(mesh: OpenMesh, call: Callable[[], object], seconds: float) -> Spell:
    """From when the last rank begins to when the last has ended, by the host's clock; ranks meet before each."""
    repeats = max(3, min(MOST_REPEATS, int(seconds / slowest(mesh, _elapsed(mesh, call, 1)) / 2)))
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


def _elapsed(mesh: OpenMesh, call: Callable[[], object], repeats: int) -> float:
    meet(mesh)
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    finish(mesh)
    return time.perf_counter() - begun


def finish(mesh: OpenMesh) -> None:
    """Wait for all that this rank's device was asked to do."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
