"""Mixed precision: casts happen before anything travels, so halos have the type of the computation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch.meta_autocast import Cast, is_any_autocast_on, meta_autocast, meta_cast


def current_cast(device: torch.device) -> Cast | None:
    """The autocast in effect for tensors on a device; tensors without data have that of the device they stand for."""
    if device.type == "meta":
        return meta_cast()
    if not torch.is_autocast_enabled(device.type):
        return None
    return Cast(device.type, torch.get_autocast_dtype(device.type))


def autocast_type(device: torch.device) -> torch.dtype | None:
    """The type of autocast on a device; None if it is off."""
    cast = current_cast(device)
    return None if cast is None else cast.dtype


def is_cast(tensor: torch.Tensor) -> bool:
    """Whether autocast may be on for a tensor; quicker than finding out which."""
    return meta_cast() is not None if tensor.is_meta else is_any_autocast_on()


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off for operators whose operands are already cast."""
    if current_cast(device) is None:
        return nullcontext()
    return meta_autocast(None) if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_inputs(
    x: Sharded, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[Sharded, torch.Tensor, torch.Tensor | None]:
    """The operands in autocast's type, if autocast is on for their device and they are not float64."""
    dtype = autocast_type(x.device)
    if dtype is None or x.dtype == torch.float64:
        return x, weight, bias
    return x.like(x.local.to(dtype)), weight.to(dtype), None if bias is None else bias.to(dtype)
