"""Sums and maxima along dims that may be cut, the same on all ranks that cut them; not differentiable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from convmesh.dist import OpenMesh, all_reduce


@dataclass(frozen=True, slots=True)
class Along:
    """The dims of a normalisation and the axes that cut them."""

    dims: tuple[int, ...]
    mesh: OpenMesh
    axes: tuple[str, ...]

    def sum(self, local: torch.Tensor) -> torch.Tensor:
        return all_reduce(local.sum(self.dims, keepdim=True), self.mesh, self.axes)

    def max(self, local: torch.Tensor) -> torch.Tensor:
        """NaNs may be lost here; they reappear in the sum of exponentials that follows."""
        if any(local.shape[dim] == 0 for dim in self.dims):
            shape = [1 if dim in self.dims else n for dim, n in enumerate(local.shape)]
            largest = local.new_full(shape, -torch.inf)
        else:
            largest = local.amax(self.dims, keepdim=True)
        return all_reduce(largest, self.mesh, self.axes, dist.ReduceOp.MAX)
