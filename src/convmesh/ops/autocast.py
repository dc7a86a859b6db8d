"""Mixed precision: casts happen before anything travels, so halos are as narrow as the work."""

from __future__ import annotations

import torch

from convmesh.ops.sharded import Sharded


def autocast_inputs(
    x: Sharded, *params: torch.Tensor | None
) -> tuple[Sharded, torch.Tensor, torch.Tensor | None]:
    """The operands in autocast's type, where autocast is on for their device and they are not float64."""
    weight, bias = params
    assert weight is not None
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.like(x.local.to(dtype)), weight.to(dtype), None if bias is None else bias.to(dtype)
