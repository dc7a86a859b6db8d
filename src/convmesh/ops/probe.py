"""Letting torch itself read an operator's arguments."""

from __future__ import annotations

import torch

from convmesh.ops.sharded import Sharded


def probe(x: Sharded | torch.Tensor) -> torch.Tensor:
    """A tensor of the global shape without data: run on it, a torch function refuses what it would refuse of `x`.

    Every rank does so before anything is sent, so all of them stop with torch's own error, or none.
    """
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
