"""Optimisers over whole and cut weights together.

On GPUs torch updates all parameters of a group in one call, which refuses to mix plain tensors and DTensors, or
DTensors of different device meshes. Such a group is updated parameter by parameter unless the user chose otherwise;
groups with one kind of weight keep the fast call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from convmesh.private_torch.dtensors import is_dtensor


def loop_over_mixed_groups(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook before an optimiser's step: choose the loop for groups with several kinds of weights."""
    del args, kwargs
    for group in optimizer.param_groups:
        is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if is_open and len({_kind(p) for p in group["params"]}) > 1:
            group["foreach"] = False


def _kind(parameter: torch.Tensor) -> int | None:
    return id(parameter.device_mesh) if is_dtensor(parameter) else None
