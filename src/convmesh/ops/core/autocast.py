"""Mixed precision: casts happen before anything travels, so halos have the type of the computation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from convmesh.ops.core.sharded import Sharded


def autocast_type(device: torch.device) -> torch.dtype | None:
    """The type of autocast on a device; None if it is off or unknown (meta)."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off for operators whose operands are already cast."""
    return nullcontext() if autocast_type(device) is None else torch.autocast(device.type, enabled=False)


def autocast_inputs(
    x: Sharded, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[Sharded, torch.Tensor, torch.Tensor | None]:
    """The operands in autocast's type, if autocast is on for their device and they are not float64."""
    dtype = autocast_type(x.device)
    if dtype is None or x.dtype == torch.float64:
        return x, weight, bias
    return x.like(x.local.to(dtype)), weight.to(dtype), None if bias is None else bias.to(dtype)
