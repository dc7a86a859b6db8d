"""Measures how much a transfer and a concurrent computation slow each other down."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from convmesh.dist import OpenMesh
from convmesh.dist.flat_buffers import FlatBuffer, Flight, start_sum
from convmesh.measure.timing import finish, median_time, meet, slowest
from convmesh.system.transfer_table import Overlap

REPEATS = 15
TRIES = 5
"""Trial runs to find how much to compute and to send."""
SECONDS_WORK = 0.01
"""About the time of the computation: longer than a scheduler's time slice."""


def measure_overlap(mesh: OpenMesh) -> Overlap:
    """All ranks alternate between computing convolutions, summing a buffer over all ranks, and both at once."""
    work = _computation(mesh)
    buffer = _buffer_as_long_as(mesh, work)

    def post() -> Flight:
        return start_sum(buffer, mesh, _all(mesh))

    rounds = [(_once(mesh, work), _once(mesh, lambda: post().wait()), *_both(mesh, work, post)) for _ in range(REPEATS)]
    compute, transfer, inner, both = (median_time(list(times)).seconds for times in zip(*rounds, strict=True))
    hidden = (compute + transfer - both) / min(compute, transfer)
    return Overlap(
        active=mesh.mesh.size,
        compute_slowdown=max(1.0, inner / compute),
        transfer_slowdown=max(1.0, both / transfer),
        hidden=min(1.0, max(0.0, hidden)),
    )


def _both(mesh: OpenMesh, work: Callable[[], object], post: Callable[[], Flight]) -> tuple[float, float]:
    """The computation's time while the sum is under way, and the time of both."""
    meet(mesh)
    start = time.perf_counter()
    flight = post()
    work()
    computed = time.perf_counter() - start
    flight.wait()
    finish(mesh)
    ended = time.perf_counter() - start
    return slowest(mesh, computed), slowest(mesh, ended)


def _once(mesh: OpenMesh, call: Callable[[], object]) -> float:
    meet(mesh)
    start = time.perf_counter()
    call()
    finish(mesh)
    return slowest(mesh, time.perf_counter() - start)


def _timed(mesh: OpenMesh, call: Callable[[], object]) -> list[float]:
    return [_once(mesh, call) for _ in range(TRIES)]


def _computation(mesh: OpenMesh) -> Callable[[], object]:
    x, weight = torch.zeros(1, 32, 64, 64, device=mesh.device), torch.zeros(32, 32, 3, 3, device=mesh.device)

    def once(times: int = 1) -> None:
        for _ in range(times):
            torch.nn.functional.conv2d(x, weight, padding=1)
        if mesh.device.type == "cuda":
            torch.cuda.current_stream(mesh.device).synchronize()  # not the transfer's stream

    once()
    times = max(1, round(SECONDS_WORK / slowest(mesh, min(_timed(mesh, once)))))
    return lambda: once(times)


def _buffer_as_long_as(mesh: OpenMesh, work: Callable[[], object]) -> FlatBuffer:
    """A buffer whose sum takes at least as long as the computation."""
    goal, elements = median_time(_timed(mesh, work)).seconds, 1 << 12
    while elements < 1 << 26:
        buffer = FlatBuffer(elements, torch.float32, mesh)
        if median_time(_timed(mesh, lambda: start_sum(buffer, mesh, _all(mesh)).wait())).seconds > goal:  # noqa: B023
            return buffer
        elements *= 2
    return buffer


def _all(mesh: OpenMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh.axes)
