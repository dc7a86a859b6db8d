"""DeepCAM: Kurth et al., "Exascale deep learning for climate analytics", 2018; the network of MLPerf HPC.

DeepLabv3+ (Chen et al. 2018) with a modified Xception (fig. 4 there) for 16 fields of the atmosphere on 768×1152 points
and three classes: cyclone, atmospheric river, neither.

| stage | output at stride 16 | |
| --- | --- | --- |
| entry | 64×384×576 | two 3×3 |
| low | 128×192×288 | 2 separable convolutions, 1 of stride 2 |
| middle | 728×48×72 | the same to 256 and 728, then 16 blocks of 3 |
| exit | 2048×48×72 | 728, 1024, 1536, 1536, 2048 |
| pyramid | 256×48×72 | 1×1, 3×3 dilated by 6, 12 and 18, and the mean over space |
| decoder | 3×768×1152 | transposed convolutions; the low stage joins at 192×288 |
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from convmesh.errors import UnknownNameError
from convmesh.models.blocks import Residual, scaled, stages, unit
from convmesh.models.initialise import convolutions, he_normal

DILATIONS = {16: ((1, 1, 2), (6, 12, 18)), 8: ((2, 2, 4), (12, 24, 36))}
"""Output stride → dilation of the middle, of the exit block and of the last convolutions; of the pyramid."""


def separable(channels: int, filters: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """A convolution per channel, then one across channels."""
    options: dict[str, Any] = {"padding": dilation, "stride": stride, "dilation": dilation, "groups": channels}
    depthwise = nn.Conv2d(channels, channels, 3, bias=False, **options)
    return stages(depthwise=depthwise, pointwise=nn.Conv2d(channels, filters, 1, bias=False))


def xception_block(
    widths: Sequence[int], stride: int = 1, dilation: int = 1, tail: bool = False, activated: bool = True
) -> Residual:
    """Separable convolutions between `widths`; one more if strided or with a `tail`."""
    layers: list[nn.Module] = []
    for channels, filters in itertools.pairwise(widths):
        layers += [separable(channels, filters, dilation=dilation), nn.BatchNorm2d(filters), nn.ReLU()]
    layers.pop()
    if tail or stride > 1:
        layers.append(separable(widths[-1], widths[-1], stride))
    same = widths[0] == widths[-1] and stride == 1
    shortcut = nn.Identity() if same else unit(widths[0], widths[-1], 1, stride=stride, activation=None)
    return Residual(nn.Sequential(*layers), shortcut, nn.ReLU() if activated else nn.Identity())


class Pyramid(nn.Module):
    """Parallel convolutions of several dilations and the mean over space, concatenated."""

    def __init__(self, channels: int, filters: int, dilations: Sequence[int]) -> None:
        super().__init__()
        dilated = (unit(channels, filters, dilation=dilation) for dilation in dilations)
        self.views = nn.ModuleList([unit(channels, filters, 1), *dilated])
        self.narrow = nn.Conv2d(channels, filters, 1, bias=False)
        # A scale and a shift per channel instead of batch norm: there is one value per sample.
        self.affine = nn.Conv2d(filters, filters, 1, groups=filters)
        self.merge = unit((len(dilations) + 2) * filters, filters, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views = [view(x) for view in self.views]
        mean = F.relu(self.affine(self.narrow(F.adaptive_avg_pool2d(x, 1))))
        views.append(F.interpolate(mean, size=x.shape[2:], mode="nearest"))
        result: torch.Tensor = self.merge(torch.cat(views, 1))
        return result


class DeepCam(nn.Module):
    """All filters scaled by `width`."""

    def __init__(self, channels: int, classes: int, output_stride: int, width: float, middle_blocks: int) -> None:
        super().__init__()
        size = partial(scaled, width=width)
        (middle, leave, last), dilations = DILATIONS[output_stride]
        self.enter = nn.Sequential(unit(channels, size(32), stride=2), unit(size(32), size(64)))
        self.low = xception_block([size(64), size(128), size(128)], stride=2, activated=False)
        self.middle = _middle(size, output_stride, middle, middle_blocks)
        self.exit = _exit(size, leave, last)
        self.pyramid = Pyramid(size(2048), size(256), dilations)
        self.skip = unit(size(128), size(48), 1)
        self.rise = nn.Sequential(*(_double(size(256)) for _ in range(2 if output_stride == 16 else 1)))
        self.decode = _decoder(size(256), size(48), classes)
        for part in (self.enter, self.low, self.middle, self.exit, self.pyramid.views):
            he_normal(convolutions(part))
        nn.init.zeros_(self.pyramid.affine.get_parameter("bias"))
        nn.init.ones_(self.pyramid.affine.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low(self.enter(x))
        deep = self.exit(self.middle(F.relu(low)))
        y = torch.cat([self.rise(self.pyramid(deep)), self.skip(low)], 1)
        result: torch.Tensor = self.decode(y)
        return result


def _middle(size: Any, output_stride: int, dilation: int, blocks: int) -> nn.Sequential:
    narrow, wide = size(256), size(728)
    second = xception_block([size(128), narrow, narrow], stride=2)
    third = xception_block([narrow, wide, wide], stride=output_stride // 8, tail=True)
    return nn.Sequential(second, third, *(xception_block([wide] * 4, dilation=dilation) for _ in range(blocks)))


def _exit(size: Any, dilation: int, last: int) -> nn.Sequential:
    wide, widths = size(728), [size(n) for n in (1024, 1536, 1536, 2048)]
    layers: list[nn.Module] = [xception_block([wide, wide, widths[0]], dilation=dilation, tail=True, activated=False)]
    for channels, filters in itertools.pairwise(widths):
        layers += [separable(channels, filters, dilation=last), nn.BatchNorm2d(filters), nn.ReLU()]
    return nn.Sequential(*layers)


def _transposed(channels: int, filters: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(channels, filters, 3, stride=2, padding=1, output_padding=1, bias=False)


def _double(filters: int) -> nn.Sequential:
    return nn.Sequential(_transposed(filters, filters), nn.BatchNorm2d(filters), nn.ReLU())


def _decoder(filters: int, skip: int, classes: int) -> nn.Sequential:
    merge = (unit(filters + skip, filters), unit(filters, filters), nn.Conv2d(filters, filters, 1))
    return nn.Sequential(*merge, _double(filters), _transposed(filters, classes))


def deepcam(
    channels: int = 16, classes: int = 3, output_stride: int = 16, width: float = 1.0, middle_blocks: int = 16
) -> DeepCam:
    """Extents are multiples of 16."""
    if output_stride not in DILATIONS:
        raise UnknownNameError.of("output_stride", output_stride, map(str, DILATIONS))
    return DeepCam(channels, classes, output_stride, width, middle_blocks)
