"""Which type sums and statistics are computed in."""

from __future__ import annotations

import torch

from convmesh.ops.sharded import Sharded

_NARROW = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to sum in: float32 for half types, which would lose small terms between ranks; else the type itself."""
    return torch.float32 if dtype in _NARROW else dtype


def as_autocast_asks(x: Sharded) -> Sharded:
    """`x` in float32 for operators that autocast on GPUs computes, and returns, in float32."""
    if x.is_cuda and x.dtype in _NARROW and torch.is_autocast_enabled("cuda"):
        return x.like(x.local.float())
    return x
