"""A network of a package: how it is built, and a small input for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """A network of a package, and the shape of a global batch for it."""

    name: str
    build: Callable[[], nn.Module]
    shape: Shape
    words: int = 0
    """For a network of tokens: how many there are."""

    def batch(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        drawing = torch.Generator().manual_seed(1)
        if self.words:
            return torch.randint(self.words, self.shape, generator=drawing)
        return torch.randn(self.shape, dtype=dtype, generator=drawing)

    def as_built(self) -> nn.Module:
        """As users bring it, in float32."""
        torch.manual_seed(0)
        return self.build().train()

    def model(self) -> nn.Module:
        """In float64, where rounding hides no mistake."""
        model = self.as_built().double()
        for weight in model.parameters():
            if weight.is_complex():  # `double()` leaves them
                weight.data = weight.data.to(torch.complex128)
        return model

    @property
    def package(self) -> str:
        """What its name begins with."""
        return self.name.partition(".")[0]

    def versions(self) -> str:
        packages = ("torch", _PACKAGES[self.package].distribution)
        return ", ".join(f"{package} {version(package)}" for package in packages)


class _Package(NamedTuple):
    """How pip and Python call a package."""

    distribution: str
    module: str


_PACKAGES = {
    "torchvision": _Package("torchvision", "torchvision"),
    "timm": _Package("timm", "timm"),
    "smp": _Package("segmentation-models-pytorch", "segmentation_models_pytorch"),
    "monai": _Package("monai", "monai.networks.nets"),
    "nnunet": _Package("dynamic-network-architectures", "dynamic_network_architectures.architectures.unet"),
    "neuralop": _Package("neuraloperator", "neuralop.models"),
}


def import_package(package: str) -> None:
    """Ahead of the processes that need it."""
    _import_torchvision()
    importlib.import_module(_PACKAGES[package].module)


def called(module: str, function: str, **options: Any) -> Callable[[], nn.Module]:
    """A factory of a package, imported only when it is called."""

    def build() -> nn.Module:
        _import_torchvision()
        made: nn.Module = getattr(importlib.import_module(module), function)(**options)
        return made

    return build


def _import_torchvision() -> None:
    """Its build for GPUs stops at kernels for boxes, where torch is a build for CPUs; no network here needs them."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for kernel in ("nms", "qnms"):
            torch.library.define(f"torchvision::{kernel}", "(Tensor boxes, Tensor scores, float least) -> Tensor")
        importlib.import_module("torchvision")


IMAGE: Shape = (2, 3, 64, 64)
