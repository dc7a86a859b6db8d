"""MobileNetV2: Sandler, Howard, Zhu, Zhmoginov and Chen, "Inverted residuals and linear bottlenecks", 2018, table 2.

| stage | output of 224×224 | expansion | blocks | stride |
| --- | --- | --- | --- | --- |
| stem | 32×112×112 | | | 2 |
| 1 | 16×112×112 | 1 | 1 | 1 |
| 2 | 24×56×56 | 6 | 2 | 2 |
| 3 | 32×28×28 | 6 | 3 | 2 |
| 4 | 64×14×14 | 6 | 4 | 2 |
| 5 | 96×14×14 | 6 | 3 | 1 |
| 6 | 160×7×7 | 6 | 3 | 2 |
| 7 | 320×7×7 | 6 | 1 | 1 |
| top | 1280×7×7 | | | 1 |
"""

from __future__ import annotations

from torch import nn

from convmesh.models.blocks import Residual, classifier, stages, unit
from convmesh.models.initialise import convolutions, dense_layers, he_normal, normal

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, filters, blocks and stride of the first block."""


def mobilenet_v2(
    channels: int = 3, classes: int = 1000, width: float = 1.0, top: int = 1280, dropout: float = 0.2
) -> nn.Sequential:
    """Depthwise convolutions between narrow layers; `width` is the paper's multiplier."""
    first = _in_eights(32 * width)
    parts: dict[str, nn.Module] = {"stem": unit(channels, first, stride=2, activation=nn.ReLU6)}
    channels = first
    for index, (expansion, published, count, stride) in enumerate(STAGES, 1):
        filters = _in_eights(published * width)
        others = (_block(filters, filters, expansion, 1) for _ in range(count - 1))
        parts[f"stage{index}"] = nn.Sequential(_block(channels, filters, expansion, stride), *others)
        channels = filters
    parts["top"] = unit(channels, top, 1, activation=nn.ReLU6)
    net = stages(**parts, head=classifier(top, classes, dropout))
    he_normal(convolutions(net), "fan_out")
    normal(dense_layers(net), std=0.01)
    return net


def _block(channels: int, filters: int, expansion: int, stride: int) -> nn.Module:
    """Widen, convolve each channel separately, narrow without activation."""
    inner = channels * expansion
    widen = [unit(channels, inner, 1, activation=nn.ReLU6)] if expansion > 1 else []
    depthwise = unit(inner, inner, stride=stride, groups=inner, activation=nn.ReLU6)
    body = nn.Sequential(*widen, depthwise, unit(inner, filters, 1, activation=None))
    same = stride == 1 and channels == filters
    return Residual(body, nn.Identity(), nn.Identity()) if same else body


def _in_eights(channels: float) -> int:
    """The nearest multiple of 8 that removes at most a tenth."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8
