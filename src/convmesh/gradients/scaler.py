"""Gradient scaling that skips a step on all ranks or on none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from convmesh.dist import OpenMesh, all_reduce
from convmesh.errors import LayoutError, UnsupportedError
from convmesh.gradients.local_gradients import local_gradient, local_of
from convmesh.gradients.owners import mesh_of, owner_of
from convmesh.private_torch.dtensors import is_dtensor
from convmesh.private_torch.unscaling import OpenGradScaler


class GradScaler(OpenGradScaler):
    """`torch.amp.GradScaler` for split networks: an overflow on one rank, in its shard or stage, counts for all.

    Torch's own looks only at its rank's gradients, and refuses to mix plain and cut weights. The mesh is that of the
    optimiser's parameters; `mesh` is for weights that have no reducer and are not cut.
    """

    def __init__(self, device: str | None = None, *, mesh: OpenMesh | None = None, **options: Any) -> None:
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"), **options)
        self._mesh = mesh

    def unscaled(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale what this rank holds; then all ranks learn whether any of them has an overflow."""
        _refuse_memory(optimizer)
        mesh = self._mesh or _mesh_of(optimizer)
        groups = [{"params": [_held(p) for p in group["params"]]} for group in optimizer.param_groups]
        local_view: Any = SimpleNamespace(param_groups=groups)
        flags = super().unscaled(local_view, inv_scale, found_inf, allow_fp16)
        here = torch.stack([flag.to(found_inf.device) for flag in flags.values()]).max() if flags else found_inf
        everywhere = all_reduce(here.float().reshape(1), mesh, tuple(mesh.mesh.axes), dist.ReduceOp.MAX)
        return {found_inf.device: everywhere[0]}


def _refuse_memory(optimizer: torch.optim.Optimizer) -> None:
    """Refuse reducers that keep something for the next step: it has this step's scale, and would keep an overflow."""
    owners = (owner_of(p) for group in optimizer.param_groups for p in group["params"])
    if any(owner is not None and owner.remembers for owner in owners):
        raise UnsupportedError(
            "`GradScaler` cannot scale gradients that are summed in low rank: what a step leaves for the next would "
            "have another scale, and an overflow would stay; use autocast to bfloat16, or `compression` 'bf16'."
        )


def _mesh_of(optimizer: torch.optim.Optimizer) -> OpenMesh:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    mesh = next((mesh for p in parameters if (mesh := mesh_of(p)) is not None), None)
    if mesh is None:
        raise LayoutError(
            "the optimiser's parameters belong to no parallelized network and none is cut, so their mesh is unknown. "
            "Make the optimiser with `net.optimizer(...)`, or the scaler with `GradScaler(mesh=...)`."
        )
    return mesh


def _held(parameter: torch.Tensor) -> torch.Tensor:
    """A cut weight as this rank's shard with its gradient, in the same memory; other weights unchanged."""
    if not is_dtensor(parameter) or parameter.grad is None:
        return parameter
    shard = local_of(parameter).detach()
    shard.grad = local_gradient(parameter)
    return shard
