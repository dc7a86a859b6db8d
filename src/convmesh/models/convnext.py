"""ConvNeXt-T: Liu, Mao, Wu, Feichtenhofer, Darrell and Xie, "A ConvNet for the 2020s", 2022, table 9.

| stage | output of 224×224 | blocks |
| --- | --- | --- |
| stem | 96×56×56 | 4×4 stride 4 |
| 1 | 96×56×56 | 3 × [7×7 depthwise, 1×1 to 384, 1×1 to 96] |
| 2 | 192×28×28 | 3 |
| 3 | 384×14×14 | 9 |
| 4 | 768×7×7 | 3 |

Stochastic depth belongs to the paper's training recipe, not to the network.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from convmesh.models.blocks import stages
from convmesh.models.initialise import truncated_normal, weighted_layers

EPSILON = 1e-6
FIRST_SCALE = 1e-6


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x.permute(0, 2, 3, 1))
        return y.permute(0, 3, 1, 2)


class Block(nn.Module):
    """Space, then channels, then a learnt scale per channel; added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=EPSILON)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), FIRST_SCALE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(F.gelu(self.widen(y))) * self.scale
        result: torch.Tensor = x + y.permute(0, 3, 1, 2)
        return result


def convnext_tiny(
    channels: int = 3, classes: int = 1000, filters: int = 96, blocks: Sequence[int] = (3, 3, 9, 3)
) -> nn.Sequential:
    """Images of 224×224; each stage has twice the filters of the one before."""
    parts: dict[str, nn.Module] = {
        "stem": nn.Sequential(nn.Conv2d(channels, filters, 4, stride=4), ChannelNorm(filters))
    }
    for index, count in enumerate(blocks):
        if index > 0:
            halve = nn.Conv2d(filters, 2 * filters, 2, stride=2)
            parts[f"down{index}"] = nn.Sequential(ChannelNorm(filters), halve)
            filters *= 2
        parts[f"stage{index + 1}"] = nn.Sequential(*(Block(filters) for _ in range(count)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), ChannelNorm(filters), nn.Flatten(), nn.Linear(filters, classes))
    net = stages(**parts, head=head)
    truncated_normal(weighted_layers(net), std=0.02)
    return net
