"""The networks of the GPU page: shapes, batches, losses and goals."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from convmesh import models

DEVICE = os.environ.get("GPU_STEP_DEVICE", "cuda")
"""`cpu` tries the machinery out where there is no GPU."""


@dataclass(frozen=True, slots=True)
class Case:
    """A network, its batch, and the time that ConvMesh may take as a fraction of torch's best."""

    model: str
    shape: tuple[int, ...]
    goal: float
    updates: bool = True
    """Whether a step includes the optimiser's update."""

    def create(self, last: bool) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = residual_encoder_unet() if self.model == "nnunet" else models.create(self.model)
        return model.to(memory_format=self.order(last))  # type: ignore[call-overload, no-any-return]

    def order(self, last: bool) -> torch.memory_format:
        if not last:
            return torch.contiguous_format
        return torch.channels_last if len(self.shape) == 4 else torch.channels_last_3d

    def batch(self, last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.shape, generator=generator).to(DEVICE).contiguous(memory_format=self.order(last))
        if self.model == "nnunet":
            return x, torch.randint(0, 3, (self.shape[0], *self.shape[2:]), generator=generator).to(DEVICE)
        target = models.find(self.model).task.draw_target(self.shape, generator).to(DEVICE)
        return x, target.float() if target.is_floating_point() else target

    def loss(self) -> Callable[..., Any]:
        return F.cross_entropy if self.model == "nnunet" else models.find(self.model).task.loss()


def residual_encoder_unet() -> nn.Module:
    """nnU-Net's ResidualEncoderUNet in its default shape for volumes."""
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    net: nn.Module = ResidualEncoderUNet(
        1, 6, (32, 64, 128, 256, 320, 320), nn.Conv3d, 3, (1, 2, 2, 2, 2, 2), (1, 3, 4, 6, 6, 6), 3, 1,
        conv_bias=True, norm_op=nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True},
    )  # fmt: skip
    return net


CASES = {
    "resnet50": Case("resnet50", (64, 3, 224, 224), 1.0),
    "unet3d": Case("unet3d", (1, 1, 128, 128, 128), 0.85),
    "nnunet": Case("nnunet", (2, 1, 128, 128, 128), 0.85, updates=False),
    "cosmoflow": Case("cosmoflow", (8, 4, 128, 128, 128), 1.0),
    "vgg16": Case("vgg16", (32, 3, 224, 224), 1.0),
    "convnext-tiny": Case("convnext-tiny", (32, 3, 224, 224), 1.0),
    "unet3d-256": Case("unet3d", (1, 1, 256, 256, 256), 0.85),
}
