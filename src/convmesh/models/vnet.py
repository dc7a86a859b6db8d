"""V-Net: Milletari, Navab and Ahmadi, "Fully convolutional neural networks for volumetric medical segmentation", 2016.

| stage | output of 128×128×64 | convolutions of 5×5×5 |
| --- | --- | --- |
| left 1 | 16×128×128×64 | 1 |
| left 2 | 32×64×64×32 | 2 |
| left 3 | 64×32×32×16 | 3 |
| left 4 | 128×16×16×8 | 3 |
| bottom | 256×8×8×4 | 3 |
| right 4 | 256×16×16×8 | 3 |
| right 3 | 128×32×32×16 | 3 |
| right 2 | 64×64×64×32 | 2 |
| right 1 | 32×128×128×64 | 1 |

Every stage adds its input to its output; 2×2×2 convolutions of stride 2 lead down and transposed ones up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from convmesh.models.blocks import norm_layer, unit
from convmesh.models.initialise import convolutions, he_normal


class Stage(nn.Module):
    """5×5×5 convolutions plus a residual sum with the input, which may have a single channel."""

    def __init__(self, channels: int, filters: int, count: int, norm: str | None) -> None:
        super().__init__()
        widths = [channels] + [filters] * count
        units = [_unit(n, f, norm) for n, f in itertools.pairwise(widths)]
        self.body = nn.Sequential(*units)
        del units[-1].activation  # the last one comes after the sum
        self.activation = nn.PReLU(filters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.activation(self.body(x) + x)
        return result


def _unit(channels: int, filters: int, norm: str | None) -> nn.Sequential:
    return unit(channels, filters, 5, norm=norm, dims=3, activation=partial(nn.PReLU, filters))


def _resize(convolution: nn.Module, filters: int, norm: str | None) -> nn.Sequential:
    return nn.Sequential(convolution, norm_layer(norm, filters, 3), nn.PReLU(filters))


class VNet(nn.Module):
    """Stages of doubling filters, down and up again, with skips between."""

    def __init__(self, classes: int, filters: int, counts: Sequence[int], norm: str | None) -> None:
        super().__init__()
        widths = [filters * 2**i for i in range(len(counts))]
        self.left = nn.ModuleList([Stage(1, filters, counts[0], norm)])
        self.left.extend(Stage(f, f, count, norm) for f, count in zip(widths[1:], counts[1:], strict=True))
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(_resize(nn.Conv3d(n, f, 2, stride=2), f, norm) for n, f in pairs)
        # A stage on the right has as many channels as the stage one level lower on the left: half come from the skip.
        below = [widths[-1], *(2 * n for n in reversed(widths[1:-1]))]
        ups = list(zip(below, reversed(widths[:-1]), strict=True))
        self.up = nn.ModuleList(_resize(nn.ConvTranspose3d(n, f, 2, stride=2), f, norm) for n, f in ups)
        rights = zip(ups, reversed(counts[:-1]), strict=True)
        self.right = nn.ModuleList(Stage(2 * f, 2 * f, count, norm) for (_, f), count in rights)
        self.leave = nn.Conv3d(2 * filters, classes, 1)
        he_normal(convolutions(self))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [self.left[0](x)]
        for down, left in zip(self.down, list(self.left)[1:], strict=True):
            skips.append(left(down(skips[-1])))
        y = skips.pop()
        for up, right, skip in zip(self.up, self.right, reversed(skips), strict=True):
            y = right(torch.cat([up(y), skip], 1))
        result: torch.Tensor = self.leave(y)
        return result


def vnet(classes: int = 2, filters: int = 16, counts: Sequence[int] = (1, 2, 3, 3, 3), norm: str | None = None) -> VNet:
    """Volumes of one channel; extents are multiples of `2**(len(counts) - 1)`."""
    return VNet(classes, filters, counts, norm)
