"""What a step gives the GPU to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def times_of(step: Callable[[], Any]) -> dict[str, list[float]]:
    """Microseconds of all kernels of one step, by name."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    spent: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == cuda and not event.is_user_annotation:
            spent.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return spent


def kernels_of(step: Callable[[], Any]) -> dict[str, Any]:
    """Kernels of one step, how long they keep the GPU busy, and the costliest of them by name."""
    spent = times_of(step)
    busiest = sorted(spent.items(), key=lambda pair: -sum(pair[1]))[:60]
    return {
        "kernels": sum(len(times) for times in spent.values()),
        "seconds_busy": sum(map(sum, spent.values())) / 1e6,
        "busiest": [[name[:120], len(times), round(sum(times))] for name, times in busiest],
    }
