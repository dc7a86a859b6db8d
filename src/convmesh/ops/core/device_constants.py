"""Small tables that operators read, kept on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from convmesh.private_torch.tracing import without_modes


@contextmanager
def lasting() -> Iterator[None]:
    """Tensors made in here may be kept for later steps: they have values even while a step is traced."""
    with torch.inference_mode(False), without_modes():
        yield


@lru_cache(maxsize=4096)
def vector(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A constant, created once: copying it to the device each time would stall the device."""
    with lasting():
        return torch.tensor(values, dtype=dtype, device=device)
