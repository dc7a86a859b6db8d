"""DenseNet-121: Huang, Liu, van der Maaten and Weinberger, "Densely connected convolutional networks", 2017, table 1.

| stage | output of 224×224 | layers |
| --- | --- | --- |
| stem | 64×56×56 | 7×7 stride 2, max 3×3 stride 2 |
| dense1, transition1 | 256×56×56, 128×28×28 | 6 × [1×1 to 128, 3×3 to 32] |
| dense2, transition2 | 512×28×28, 256×14×14 | 12 |
| dense3, transition3 | 1024×14×14, 512×7×7 | 24 |
| dense4 | 1024×7×7 | 16 |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from convmesh.models.blocks import classifier, stages, unit
from convmesh.models.initialise import convolutions, dense_layers, fill_bias, he_normal


class DenseLayer(nn.Module):
    """Adds `growth` channels to its input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        inner = 4 * growth
        self.narrow = preactivated(channels, inner, 1)
        self.grow = preactivated(inner, growth, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.grow(self.narrow(x))], 1)


def preactivated(channels: int, filters: int, kernel: int) -> nn.Sequential:
    """Norm and activation come before the convolution."""
    convolution = nn.Conv2d(channels, filters, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), convolution)


def densenet121(
    channels: int = 3,
    classes: int = 1000,
    growth: int = 32,
    filters: int = 64,
    blocks: Sequence[int] = (6, 12, 24, 16),
) -> nn.Sequential:
    """Images of 224×224; every layer sees the outputs of all earlier layers of its stage."""
    parts: dict[str, nn.Module] = {
        "stem": nn.Sequential(unit(channels, filters, 7, stride=2), nn.MaxPool2d(3, 2, padding=1))
    }
    for index, count in enumerate(blocks, 1):
        if index > 1:
            parts[f"transition{index - 1}"] = nn.Sequential(preactivated(filters, filters // 2, 1), nn.AvgPool2d(2))
            filters //= 2
        parts[f"dense{index}"] = nn.Sequential(*(DenseLayer(filters + i * growth, growth) for i in range(count)))
        filters += count * growth
    net = stages(**parts, norm=nn.BatchNorm2d(filters), activation=nn.ReLU(), head=classifier(filters, classes))
    he_normal(convolutions(net))
    for layer in dense_layers(net):
        fill_bias(layer)
    return net
