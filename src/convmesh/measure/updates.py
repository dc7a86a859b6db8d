"""Steps of optimisers, as torch does them by default: so much for each tensor, and so much for each element."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from convmesh.measure.operators import Repeats, clock_on
from convmesh.system.operators import UpdateTiming

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3),
}
_MANY = [(64,)] * 128
_LARGE = {"cpu": [(1 << 20,)] * 24, "cuda": [(1 << 23,)] * 16}
"""More than caches hold: a step touches every weight once."""


def measure_updates(
    device: torch.device, dtypes: Sequence[torch.dtype] = (torch.float32,), active: int = 1
) -> dict[str, UpdateTiming]:
    """By optimiser and number format, on many small tensors and on few large ones."""
    return {
        f"{name} {str(dtype).removeprefix('torch.')}": _update(make, device, dtype, active)
        for name, make in OPTIMIZERS.items()
        for dtype in dtypes
    }


def _update(make: Any, device: torch.device, dtype: torch.dtype, active: int) -> UpdateTiming:
    small, _, host = _stepped(make, _MANY, device, dtype)
    shapes = _LARGE[device.type]
    large, _, _ = _stepped(make, shapes, device, dtype)
    each = small / len(_MANY)
    elements = sum(shape[0] for shape in shapes)
    return UpdateTiming(each, max(0.0, large - each * len(shapes)) / elements, host / len(_MANY), active)


def _stepped(make: Any, shapes: Any, device: torch.device, dtype: torch.dtype) -> tuple[float, float, float]:
    weights = [nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight) * 1e-3
    optimizer = make(weights)
    return clock_on(device)([optimizer.step], Repeats(most=10))
