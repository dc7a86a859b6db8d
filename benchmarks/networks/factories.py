"""A network of a package: how it is built, and a small input for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """A network of a package, and the shape of a global batch for it."""

    name: str
    build: Callable[[], nn.Module]
    shape: Shape

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build().double().train()
        for weight in model.parameters():
            if weight.is_complex():  # `double()` leaves them
                weight.data = weight.data.to(torch.complex128)
        return model

    def versions(self) -> str:
        packages = ("torch", _PACKAGES[self.name.partition(".")[0]])
        return ", ".join(f"{package} {version(package)}" for package in packages)


_PACKAGES = {
    "torchvision": "torchvision",
    "timm": "timm",
    "smp": "segmentation-models-pytorch",
    "monai": "monai",
    "nnunet": "dynamic-network-architectures",
    "neuralop": "neuraloperator",
}
"""The distribution that a name begins with."""


def called(module: str, function: str, **options: Any) -> Callable[[], nn.Module]:
    """A factory of a package, imported only when it is called."""

    def build() -> nn.Module:
        made: nn.Module = getattr(importlib.import_module(module), function)(**options)
        return made

    return build


IMAGE: Shape = (2, 3, 64, 64)
