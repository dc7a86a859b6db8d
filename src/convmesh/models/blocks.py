"""Blocks shared by reference networks: convolution, norm and activation; residual sums; parallel branches."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from convmesh.errors import UnknownNameError

CONVOLUTION: dict[int, Callable[..., nn.Module]] = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Callable[..., nn.Module]] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MAX_POOL: dict[int, Callable[..., nn.Module]] = {2: nn.MaxPool2d, 3: nn.MaxPool3d}

CHANNELS_PER_GROUP = 16
"""Group norm works best with this many (Wu and He, 2018, table 3)."""

Activation = Callable[[], nn.Module]


def scaled(channels: int, width: float) -> int:
    """`channels` of a network that is `width` times as wide as published."""
    return max(1, round(channels * width))


def norm_layer(norm: str | None, channels: int, dims: int = 2, **options: Any) -> nn.Module:
    """The norm called "batch", "instance" or "group", or none."""
    layers: dict[str | None, Callable[[], nn.Module]] = {
        "batch": lambda: {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](channels, **options),
        "instance": lambda: {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dims](channels, affine=True, **options),
        "group": lambda: nn.GroupNorm(_groups(channels), channels, **options),
        None: nn.Identity,
    }
    if norm not in layers:
        raise UnknownNameError.of("norm", norm, ["batch", "instance", "group", "None"])
    return layers[norm]()


def _groups(channels: int) -> int:
    return math.gcd(channels, max(1, channels // CHANNELS_PER_GROUP))


def unit(
    channels: int,
    filters: int,
    kernel: int | tuple[int, ...] = 3,
    *,
    norm: str | None = "batch",
    activation: Activation | None = nn.ReLU,
    dims: int = 2,
    **options: Any,
) -> nn.Sequential:
    """Convolution, norm, activation. Stride 1 keeps the extents unless `padding` is given; a norm replaces the bias."""
    sides = (kernel,) * dims if isinstance(kernel, int) else kernel
    same = tuple((side - 1) // 2 * options.get("dilation", 1) for side in sides)
    convolution = CONVOLUTION[dims](channels, filters, sides, **{"padding": same, "bias": norm is None, **options})
    layers: dict[str, nn.Module] = {"conv": convolution}
    if norm is not None:
        layers["norm"] = norm_layer(norm, filters, dims)
    if activation is not None:
        layers["activation"] = activation()
    return nn.Sequential(OrderedDict(layers))


def stages(**layers: nn.Module) -> nn.Sequential:
    """A sequence of named layers."""
    return nn.Sequential(OrderedDict(layers))


class Residual(nn.Module):
    """`activation(body(x) + shortcut(x))`."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut, self.activation = body, shortcut, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.activation(self.body(x) + self.shortcut(x))
        return result


class Branches(nn.Module):
    """Parallel branches, their channels concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def classifier(channels: int, classes: int, dropout: float = 0.0) -> nn.Sequential:
    """The mean over space and one dense layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, classes))
