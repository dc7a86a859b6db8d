"""The types in which sums and statistics are computed."""

from __future__ import annotations

import torch

from convmesh.ops.core.autocast import current_cast
from convmesh.ops.core.sharded import Sharded

_NARROW = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to sum in: float32 for half types, which would lose small terms between ranks; else the type itself."""
    return torch.float32 if dtype in _NARROW else dtype


def result_type(x: Sharded) -> torch.dtype:
    """The result type of operators that autocast on GPUs computes in float32."""
    cast = current_cast(x.device)
    return wide(x.dtype) if cast is not None and cast.kind == "cuda" else x.dtype


def as_autocast_asks(x: Sharded) -> Sharded:
    """`x` in the type of `result_type`."""
    return x.like(x.local.to(result_type(x)))
