"""The kind of device that a tensor is on or, without data, stands for: a dry run uses that device's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_STANDS_FOR: ContextVar[str] = ContextVar("stands_for", default="cuda")


def kind_of(device: torch.device) -> str:
    """`cpu`, `cuda`, …; for tensors without data, the kind that they stand for."""
    return _STANDS_FOR.get() if device.type == "meta" else device.type


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Let tensors without data stand for tensors on this kind of device."""
    token = _STANDS_FOR.set(kind)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)
