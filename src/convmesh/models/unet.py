"""U-Nets of two and three dims.

unet2d: Ronneberger, Fischer and Brox, "U-Net: convolutional networks for biomedical image segmentation", 2015, fig. 1.
Levels of 64, 128, 256, 512 and 1024 filters; two 3×3 convolutions per level; max 2×2 on the way down. `padded=False`
follows the paper: convolutions without padding and cropped skips, 572×572 to 388×388.

unet3d: the 3D U-Net of MLPerf Training (KiTS19), after Çiçek et al. 2016 and Isensee et al. 2019.

| level | output of 128³ | |
| --- | --- | --- |
| 0 | 32×128³ | two 3×3×3 |
| 1 | 64×64³ | the first of two has stride 2 |
| 2 | 128×32³ | |
| 3 | 256×16³ | |
| 4 | 320×8³ | |
| 5 | 320×4³ | |

Then up again: 2×2×2 transposed, the skip, two 3×3×3; finally 1×1×1 to the classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from convmesh.models.blocks import CONVOLUTION, MAX_POOL, TRANSPOSED, unit
from convmesh.models.initialise import convolutions, he_normal


@dataclass(frozen=True)
class Style:
    """Options shared by all levels."""

    dims: int
    norm: str | None
    strided: bool
    """Whether a level halves the extents by the stride of its first convolution; else by pooling."""
    padded: bool = True

    def level(self, channels: int, filters: int, halve: bool = False) -> nn.Sequential:
        """Two convolutions; `halve` halves the extents first."""
        stride = 2 if halve and self.strided else 1
        padding = 1 if self.padded else 0
        pool = [MAX_POOL[self.dims](2)] if halve and not self.strided else []
        first = unit(channels, filters, norm=self.norm, dims=self.dims, padding=padding, stride=stride)
        return nn.Sequential(*pool, first, unit(filters, filters, norm=self.norm, dims=self.dims, padding=padding))


class Rise(nn.Module):
    """One level up: double the extents, join the skip without a `margin` at its borders, convolve twice."""

    def __init__(self, channels: int, filters: int, style: Style, margin: int) -> None:
        super().__init__()
        self.up = TRANSPOSED[style.dims](channels, filters, 2, stride=2)
        self.merge = style.level(2 * filters, filters)
        self.window = (slice(None), slice(None), *[slice(margin, -margin)] * style.dims) if margin else None

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        cropped = skip if self.window is None else skip[self.window]
        result: torch.Tensor = self.merge(torch.cat([self.up(x), cropped], 1))
        return result


class UNet(nn.Module):
    """Levels with these filters, down and up again, with skips between."""

    def __init__(self, channels: int, classes: int, filters: Sequence[int], style: Style) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(filters))
        self.enter = style.level(channels, filters[0])
        self.down = nn.ModuleList(style.level(n, f, halve=True) for n, f in pairs)
        margins = [0 if style.padded else _margin(i) for i in range(len(pairs))]
        self.up = nn.ModuleList(Rise(n, f, style, m) for (f, n), m in zip(reversed(pairs), margins, strict=True))
        self.leave = CONVOLUTION[style.dims](filters[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [self.enter(x)]
        for level in self.down:
            levels.append(level(levels[-1]))
        y = levels.pop()
        for rise, skip in zip(self.up, reversed(levels), strict=True):
            y = rise(y, skip)
        result: torch.Tensor = self.leave(y)
        return result


def _margin(index: int) -> int:
    """Indices that unpadded convolutions remove at each border between a skip and its use: 4, 16, 40, 88."""
    return 4 if index == 0 else 2 * _margin(index - 1) + 8


def unet2d(
    channels: int = 1,
    classes: int = 2,
    filters: int = 64,
    levels: int = 5,
    norm: str | None = None,
    padded: bool = True,
) -> UNet:
    """Images; extents are multiples of `2**(levels - 1)` if padded."""
    style = Style(dims=2, norm=norm, strided=False, padded=padded)
    net = UNet(channels, classes, [filters * 2**i for i in range(levels)], style)
    he_normal(convolutions(net))
    return net


def unet3d(
    channels: int = 1,
    classes: int = 3,
    filters: int = 32,
    levels: int = 6,
    most_filters: int = 320,
    norm: str | None = "instance",
    dims: int = 3,
) -> UNet:
    """Volumes; extents are multiples of `2**(levels - 1)`. As in MLPerf, weights keep torch's initialisation."""
    style = Style(dims=dims, norm=norm, strided=True)
    return UNet(channels, classes, [min(filters * 2**i, most_filters) for i in range(levels)], style)
