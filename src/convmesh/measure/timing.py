"""Times operations that several ranks perform together."""

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
"""Input of the layer computed between transfers, which takes a core a few milliseconds."""
INPUTS = 12
"""Inputs of that layer, used in turn: more memory than a core's caches hold."""
SQUARE = 256
"""Size of the matrices multiplied instead if ranks take turns on cores."""
POSTINGS = 40
AXES = ("filter",)
"""The mesh axis along which transfers are measured; its groups work concurrently."""
OTHERS = ("data",)


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """A time from several measurements, and half the spread of their inner half, as a fraction."""

    seconds: float
    spread: float


def time_after_work(mesh: OpenMesh, call: Callable[[], object], seconds: float) -> MeasuredTime:
    """Time of `call` right after a computation, as in a network; the same on all ranks.

    Back-to-back calls would find threads and connections awake, their code in the cache, and time slices not yet used
    up: they would take a third of the time, or two thirds after a sum over memory instead of a layer. Ranks with equal
    work finish at slightly different moments, in random order; the mean includes the wait for the last one. A rank
    that is always last has the slowest core, which operator timings already account for, so of a group's ranks the
    one that waits least counts. Of several groups, the slowest counts.
    """
    work = layer_of(mesh)
    once = slowest(mesh, _elapsed(mesh, lambda: (work(), call())))
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(seconds / once)))
    meet(mesh)
    own = trimmed_mean([_after_work(mesh, work, call) for _ in range(repeats)])
    measured = torch.tensor([own.seconds, own.spread], dtype=torch.float64, device=mesh.device)
    least = all_reduce(measured, mesh, AXES, dist.ReduceOp.MIN)
    return MeasuredTime(*all_reduce(least, mesh, OTHERS, dist.ReduceOp.MAX).tolist())


def layer_of(mesh: OpenMesh) -> Callable[[], object]:
    """A computation like a layer's. If ranks take turns on cores it is shorter than a time slice, since waiting for
    other ranks' slices is priced with their computations."""
    if mesh.device.type == "cpu" and mesh.mesh.size > len(os.sched_getaffinity(0)):
        square = torch.ones(SQUARE, SQUARE)
        return lambda: torch.mm(square, square)
    channels = SHAPE[1]
    layer = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
    layer.to(mesh.device).requires_grad_(False)
    inputs = itertools.cycle([torch.randn(SHAPE, device=mesh.device) for _ in range(INPUTS)])
    return lambda: layer(next(inputs))


def posting(mesh: OpenMesh, call: Callable[[], object]) -> float:
    """CPU time of `call` on this rank's own thread, without waiting; the least over all ranks."""
    times = []
    for _ in range(POSTINGS):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    own = torch.tensor([statistics.median(times)], dtype=torch.float64)
    return float(all_reduce(own, mesh, tuple(mesh.mesh.axes), dist.ReduceOp.MIN))


def _after_work(mesh: OpenMesh, work: Callable[[], object], call: Callable[[], object]) -> float:
    work()
    finish(mesh)
    start = time.perf_counter()
    call()
    finish(mesh)
    return time.perf_counter() - start


def one_by_one(mesh: OpenMesh, call: Callable[[], object], seconds: float) -> MeasuredTime:
    """Time from the last rank's start to the last rank's end, by the host's clock; ranks synchronise before each."""
    repeats = max(3, min(MOST_REPEATS, int(seconds / slowest(mesh, _elapsed(mesh, call)) / 2)))
    times = []
    for _ in range(repeats):
        meet(mesh)
        start = time.perf_counter()
        call()
        finish(mesh)
        end = time.perf_counter()
        times.append(max(1e-7, slowest(mesh, end) - slowest(mesh, start)))
    return median_time(times)


def median_time(times: list[float]) -> MeasuredTime:
    """Median and spread of repeated measurements."""
    middle = statistics.median(times)
    low, high = sorted(times)[len(times) // 4], sorted(times)[-1 - len(times) // 4]
    return MeasuredTime(middle, (high - low) / 2 / middle)


def trimmed_mean(times: list[float]) -> MeasuredTime:
    """The mean, because a step sums many of them, some of which wait for their turn on a core. The longest tenth is
    left out: other processes cause it, and a single one can be a hundred times as long as the rest."""
    kept = sorted(times)[: len(times) - max(1, len(times) // 10)]
    return MeasuredTime(statistics.fmean(kept), median_time(times).spread)


def slowest(mesh: OpenMesh, seconds: float) -> float:
    """The largest of the ranks' values."""
    value = torch.tensor([seconds], dtype=torch.float64, device=mesh.device)
    return float(all_reduce(value, mesh, tuple(mesh.mesh.axes), dist.ReduceOp.MAX))


def meet(mesh: OpenMesh) -> None:
    """Wait for all ranks."""
    slowest(mesh, 0.0)


def _elapsed(mesh: OpenMesh, call: Callable[[], object]) -> float:
    meet(mesh)
    start = time.perf_counter()
    call()
    finish(mesh)
    return time.perf_counter() - start


def finish(mesh: OpenMesh) -> None:
    """Wait until this rank's device has finished its work."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
