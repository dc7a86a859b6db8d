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

BATCHES = 5
"""Measurements of which the middle one counts."""
MOST_REPEATS = 40


@dataclass(frozen=True, slots=True)
class Spell:
    """The middle of several measurements, and how far apart the inner half of them is, as a fraction."""

    seconds: float
    spread: float


def together(mesh: OpenMesh, call: Callable[[], object], seconds: float) -> Spell:
    """What `call` takes the slowest rank, one after the other, in about `seconds`; the same on all ranks."""
    once = slowest(mesh, _elapsed(mesh, call, 1))
    repeats = max(1, min(MOST_REPEATS, int(seconds / BATCHES / once)))
    batches = BATCHES if repeats > 1 else max(1, min(BATCHES, int(seconds / once)))
    return spell([slowest(mesh, _elapsed(mesh, call, repeats)) / repeats for _ in range(batches)])


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
