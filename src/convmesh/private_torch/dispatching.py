"""Seeing every operator that runs: torch documents the mode only in its notes on extending it."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensor as FakeTensor  # what DTensor computes shapes with; it holds no memory
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class UncompiledDispatchMode(TorchDispatchMode):
    """A mode in which nothing is compiled: torch's guard against that takes longer than most dry-run operators."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def has_meta_kernel(operator: str) -> bool:
    """Whether torch can tell the shape of an aten operator's result: a second registration would be an error."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "Meta")
