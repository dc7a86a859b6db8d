"""The networks of the page, their batches, and small ones that try the machinery out."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from convmesh import models

DEVICE = os.environ.get("ORACLE_GPU_DEVICE", "cuda")
"""`cpu` tries the machinery out where there is no GPU."""
IS_SMALL = bool(os.environ.get("ORACLE_GPU_SMALL"))
"""Whether the registry's small networks stand for the real ones."""


@dataclass(frozen=True, slots=True)
class Case:
    """A network and its batch; steps run under autocast to bfloat16, with channels innermost."""

    model: str
    shape: tuple[int, ...]
    is_eager: bool = True
    """Whether its eager step is measured too, beside the compiled one."""

    @property
    def name(self) -> str:
        return f"{self.model} {'x'.join(map(str, self.shape))}"

    def create(self, device: str = DEVICE) -> torch.nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            model = models.find(self.model).small().create() if IS_SMALL else models.create(self.model)
        return model.to(memory_format=self._order)  # type: ignore[call-overload, no-any-return]

    @property
    def sample(self) -> tuple[int, ...]:
        if not IS_SMALL:
            return self.shape
        small = models.find(self.model)
        return (small.small_batch, *small.small_sample)

    @property
    def _order(self) -> torch.memory_format:
        return torch.channels_last if len(self.shape) == 4 else torch.channels_last_3d

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.sample, generator=generator).to(DEVICE).contiguous(memory_format=self._order)
        target = self.task.draw_target(self.sample, generator).to(DEVICE)
        return x, target.float() if target.is_floating_point() else target

    @property
    def task(self) -> models.Task:
        found = models.find(self.model)
        return found.small().task if IS_SMALL else found.task


HELD_OUT = ("mobilenet-v2", "densenet121", "vnet", "vit")
"""Networks of whose compiled steps no rule of the oracle was made: chosen before any of them was measured."""

CASES = {
    case.name: case
    for case in (
        Case("resnet50", (64, 3, 224, 224)),
        Case("vgg16", (32, 3, 224, 224)),
        Case("convnext-tiny", (32, 3, 224, 224)),
        Case("unet3d", (1, 1, 128, 128, 128)),
        Case("cosmoflow", (8, 4, 128, 128, 128)),
        Case("unet2d", (8, 1, 512, 512)),
        Case("resnet18", (32, 3, 224, 224)),
        Case("mobilenet-v2", (64, 3, 224, 224), is_eager=False),
        Case("densenet121", (32, 3, 224, 224), is_eager=False),
        Case("vnet", (1, 1, 128, 128, 128), is_eager=False),
        Case("vit", (64, 3, 224, 224), is_eager=False),
    )
}
