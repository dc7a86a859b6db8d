"""Times torch's default optimiser steps: seconds per tensor and per element."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from convmesh.dist.barriers import wait_for_all
from convmesh.measure.operator_times import Repeats, clock_on
from convmesh.system.operator_table import UpdateTiming, update_key
from convmesh.testing import run_ranks

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3),
}
_MANY = [(64,)] * 128
_LARGE = {"cpu": [(1 << 20,)] * 24, "cuda": [(1 << 23,)] * 16}
"""More than the caches hold: a step touches every weight once."""
_LEAST_LARGE = 4
"""Least number of these tensors on each of many ranks, which share caches and memory."""


def measure_updates_at_once(active: int, seconds_timeout: float) -> dict[str, UpdateTiming]:
    """Timings on a CPU while `active` forked ranks do the same: those of the slowest, for which the others wait."""
    by_rank = run_ranks(
        active, measure_updates, torch.device("cpu"), (torch.float32,), active, seconds_timeout=seconds_timeout
    )
    return {key: _slowest([timings[key] for timings in by_rank]) for key in by_rank[0]}


def _slowest(timings: Sequence[UpdateTiming]) -> UpdateTiming:
    return UpdateTiming(
        max(timing.seconds_tensor for timing in timings),
        max(timing.seconds_element for timing in timings),
        active=timings[0].active,
    )


def measure_updates(
    device: torch.device, dtypes: Sequence[torch.dtype] = (torch.float32,), active: int = 1
) -> dict[str, UpdateTiming]:
    """Timings by optimiser and number format, from many small tensors and a few large ones.

    If more than one rank is `active`, all of them call this at once.
    """
    return {
        update_key(name, str(dtype).removeprefix("torch."), active): _update(make, device, dtype, active)
        for name, make in OPTIMIZERS.items()
        for dtype in dtypes
    }


def _update(make: Any, device: torch.device, dtype: torch.dtype, active: int) -> UpdateTiming:
    small, _, host = _stepped(make, _MANY, device, dtype, active)
    shapes = _LARGE[device.type]
    shapes = shapes[: max(_LEAST_LARGE, len(shapes) // active)]
    large, _, _ = _stepped(make, shapes, device, dtype, active)
    each = small / len(_MANY)
    elements = sum(shape[0] for shape in shapes)
    return UpdateTiming(each, max(0.0, large - each * len(shapes)) / elements, host / len(_MANY), active)


def _stepped(
    make: Any, shapes: Any, device: torch.device, dtype: torch.dtype, active: int
) -> tuple[float, float, float]:
    weights = [nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight) * 1e-3
    optimizer = make(weights)
    if active > 1:
        wait_for_all()  # else some would still draw numbers while others are timed
    return clock_on(device)([optimizer.step], Repeats(most=10), active)
