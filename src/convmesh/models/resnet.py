"""ResNets: He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2016, table 1.

| stage | output of 224×224 | resnet18 | resnet50 | resnet152 |
| --- | --- | --- | --- | --- |
| stem | 64×56×56 | 7×7 stride 2, max 3×3 stride 2 | same | same |
| 1 | 56×56 | 2 × [64, 64] | 3 × [64, 64, 256] | 3 |
| 2 | 28×28 | 2 × [128, 128] | 4 × [128, 128, 512] | 8 |
| 3 | 14×14 | 2 × [256, 256] | 6 × [256, 256, 1024] | 36 |
| 4 | 7×7 | 2 × [512, 512] | 3 × [512, 512, 2048] | 3 |

The stride of a bottleneck is in its 3×3 convolution. Wide ResNets (Zagoruyko and Komodakis, "Wide residual networks",
2016) have twice the filters there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from convmesh.models.blocks import Residual, classifier, stages, unit
from convmesh.models.initialise import convolutions, he_normal

Body = Callable[[int, int, int], tuple[nn.Sequential, int]]
"""Channels, filters, stride → the layers that the shortcut bypasses, and their output channels."""


def basic(channels: int, filters: int, stride: int) -> tuple[nn.Sequential, int]:
    return nn.Sequential(unit(channels, filters, stride=stride), unit(filters, filters, activation=None)), filters


def bottleneck(channels: int, filters: int, stride: int, width: int = 1) -> tuple[nn.Sequential, int]:
    inner, out = filters * width, filters * 4
    body = (unit(channels, inner, 1), unit(inner, inner, stride=stride), unit(inner, out, 1, activation=None))
    return nn.Sequential(*body), out


def wide_bottleneck(channels: int, filters: int, stride: int) -> tuple[nn.Sequential, int]:
    return bottleneck(channels, filters, stride, width=2)


def resnet(body: Body, blocks: Sequence[int], channels: int, classes: int, filters: int, added: float) -> nn.Sequential:
    """A stem, stages of `blocks` residual blocks each, the mean over space and a dense layer.

    `added` scales what a block initially adds to its shortcut: 1 as published, 0 as in Goyal et al. 2017, section 5.1.
    """
    stem = nn.Sequential(unit(channels, filters, 7, stride=2), nn.MaxPool2d(3, 2, padding=1))
    parts, channels = {"stem": stem}, filters
    for index, count in enumerate(blocks):
        layers = []
        for position in range(count):
            stride = 2 if index > 0 and position == 0 else 1
            block, channels = _block(body, channels, filters * 2**index, stride, added)
            layers.append(block)
        parts[f"stage{index + 1}"] = nn.Sequential(*layers)
    net = stages(**parts, head=classifier(channels, classes))
    he_normal(convolutions(net), "fan_out")
    return net


def _block(body: Body, channels: int, filters: int, stride: int, added: float) -> tuple[Residual, int]:
    layers, out = body(channels, filters, stride)
    nn.init.constant_(layers[-1].get_parameter("norm.weight"), added)
    same = stride == 1 and channels == out
    shortcut = nn.Identity() if same else unit(channels, out, 1, stride=stride, activation=None)
    return Residual(layers, shortcut, nn.ReLU()), out


def resnet18(channels: int = 3, classes: int = 1000, filters: int = 64, added: float = 1.0) -> nn.Sequential:
    return resnet(basic, (2, 2, 2, 2), channels, classes, filters, added)


def resnet50(channels: int = 3, classes: int = 1000, filters: int = 64, added: float = 1.0) -> nn.Sequential:
    return resnet(bottleneck, (3, 4, 6, 3), channels, classes, filters, added)


def resnet152(channels: int = 3, classes: int = 1000, filters: int = 64, added: float = 1.0) -> nn.Sequential:
    return resnet(bottleneck, (3, 8, 36, 3), channels, classes, filters, added)


def wide_resnet50_2(channels: int = 3, classes: int = 1000, filters: int = 64, added: float = 1.0) -> nn.Sequential:
    return resnet(wide_bottleneck, (3, 4, 6, 3), channels, classes, filters, added)
