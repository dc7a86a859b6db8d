"""Gradient scaling that skips a step on all ranks or on none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from convmesh.dist import OpenMesh, all_reduce
from convmesh.gradients.local_gradients import local_gradient, local_of


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a mesh: an overflow on one rank, in its shard or stage, counts for all.

    Torch's own looks at the gradients of its rank, and refuses plain and cut weights together.
    """

    def __init__(self, mesh: OpenMesh, **options: Any) -> None:
        super().__init__(mesh.device.type, **options)
        self._mesh = mesh

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale what this rank holds; then every rank learns whether any found an overflow."""
        groups = [{"params": [_held(p) for p in group["params"]]} for group in optimizer.param_groups]
        seen: Any = SimpleNamespace(param_groups=groups)
        found = super()._unscale_grads_(seen, inv_scale, found_inf, allow_fp16)
        here = torch.stack([value.to(found_inf.device) for value in found.values()]).max() if found else found_inf
        everywhere = all_reduce(here.float().reshape(1), self._mesh, tuple(self._mesh.mesh.axes), dist.ReduceOp.MAX)
        return {found_inf.device: everywhere[0]}


def _held(parameter: torch.Tensor) -> torch.Tensor:
    """A cut weight as this rank's shard with its gradient, in the same memory; others as they are."""
    if not isinstance(parameter, DTensor) or parameter.grad is None:
        return parameter
    shard = local_of(parameter).detach()
    shard.grad = local_gradient(parameter)
    return shard
