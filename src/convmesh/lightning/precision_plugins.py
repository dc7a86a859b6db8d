"""Lightning's precision plug-ins on split networks: gradients are clipped and unscaled over all ranks."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from convmesh.dist import OpenMesh
from convmesh.gradients import GradScaler, clip_grad_norm_
from convmesh.gradients.local_gradients import local_gradient


def adapted(plugin: Any, mesh: OpenMesh) -> None:
    """Make a plug-in clip and unscale as split networks need: torch's own sees only one rank's gradients."""

    def by_norm(self: Any, optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_norm_(list(self.main_params(optimizer)), clip_val, mesh=mesh)

    def by_value(self: Any, optimizer: Optimizer, clip_val: float) -> None:
        for parameter in self.main_params(optimizer):
            if parameter.grad is not None:
                local_gradient(parameter).clamp_(-clip_val, clip_val)

    plugin.clip_grad_by_norm = MethodType(by_norm, plugin)
    plugin.clip_grad_by_value = MethodType(by_value, plugin)
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler):
        plugin.scaler = _split_scaler(scaler, plugin.device, mesh)


def _split_scaler(scaler: torch.amp.GradScaler, device: str, mesh: OpenMesh) -> GradScaler:
    """A scaler for a mesh that continues from `scaler`."""
    made = GradScaler(device, mesh=mesh, enabled=scaler.is_enabled())
    if scaler.is_enabled():
        made.load_state_dict(scaler.state_dict())
    return made
