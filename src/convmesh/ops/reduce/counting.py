"""Split histograms."""

from __future__ import annotations

import torch

from convmesh.dist import all_reduce
from convmesh.errors import UnsupportedError
from convmesh.layout import Layout
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded


@implements(torch.histc, torch.Tensor.histc)
def histc(input: Sharded, bins: int = 100, min: float = 0, max: float = 0) -> Sharded:  # noqa: A002 - torch's names
    """How many values fall into each of several equal bins; those outside the range are not counted."""
    if not min < max:
        raise UnsupportedError(
            f"`histc` (min={min}, max={max}): give the range, min < max; torch would look for it in the values."
        )
    counts = all_reduce(torch.histc(input.local, bins, min, max), input.mesh, input.layout.axes)
    return Sharded(counts, Layout.of(input.mesh.mesh, counts.shape), input.mesh)
