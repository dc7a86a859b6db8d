"""The step before every local computation: fetch the part of the input that the output box needs."""

from __future__ import annotations

import torch

from convmesh.dist import exchange
from convmesh.layout import Layout
from convmesh.ops.core.exchange_plans import Maps, halo
from convmesh.ops.core.sharded import Sharded


def fetch(x: Sharded, work: Layout, maps: Maps) -> torch.Tensor:
    """The indices of `x` that this rank needs for its box of an output laid out as `work`; differentiable.

    Indices needed from two ends of a dim (periodic borders) come back to back, in index order.
    """
    return exchange(x.local, halo(x.layout, work, maps, x.mesh.rank), x.mesh)
