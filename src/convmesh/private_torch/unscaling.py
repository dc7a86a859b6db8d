"""Where a GradScaler unscales gradients and looks for overflows: torch offers no hook between the two."""

from __future__ import annotations

import torch

Found = dict[torch.device, torch.Tensor]


class OpenGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose unscaling a subclass can change by overriding `unscaled`."""

    def unscaled(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Found:
        """Unscale all gradients of the optimiser; return, by device, whether any was not finite."""
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Found:
        return self.unscaled(optimizer, inv_scale, found_inf, allow_fp16)
