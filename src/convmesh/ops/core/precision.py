"""The types in which sums and statistics are computed."""

from __future__ import annotations

import torch

from convmesh.ops.core.sharded import Sharded

_NARROW = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to sum in: float32 for half types, which would lose small terms between ranks; else the type itself."""
    return torch.float32 if dtype in _NARROW else dtype


def result_type(x: Sharded) -> torch.dtype:
    """The type of results of operators that autocast on GPUs computes in float32."""
    has_autocast = x.is_cuda and torch.is_autocast_enabled("cuda")
    return wide(x.dtype) if has_autocast else x.dtype


def as_autocast_asks(x: Sharded) -> Sharded:
    """`x` in the type of `result_type`."""
    return x.like(x.local.to(result_type(x)))
