"""VGG-16: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", 2015, table 1.

| stage | output of 224×224 | convolutions of 3×3, then max 2×2 |
| --- | --- | --- |
| 1 | 64×112×112 | 2 |
| 2 | 128×56×56 | 2 |
| 3 | 256×28×28 | 3 |
| 4 | 512×14×14 | 3 |
| 5 | 512×7×7 | 3 |
| dense | 4096, 4096, classes | |
"""

from __future__ import annotations

import itertools

from torch import nn

from convmesh.models.blocks import scaled, stages, unit
from convmesh.models.initialise import convolutions, dense_layers, he_normal, normal

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def vgg16(
    channels: int = 3,
    classes: int = 1000,
    width: float = 1.0,
    pooled: int = 7,
    dropout: float = 0.5,
    norm: str | None = None,
) -> nn.Sequential:
    """Images of 224×224; `width` scales all filters."""
    parts: dict[str, nn.Module] = {}
    for index, (published, count) in enumerate(STAGES, 1):
        filters = scaled(published, width)
        parts[f"stage{index}"] = _stage(channels, filters, count, norm)
        channels = filters
    dense = scaled(4096, width)
    net = stages(
        **parts,
        pool=nn.Sequential(nn.AdaptiveAvgPool2d(pooled), nn.Flatten()),
        dense1=nn.Sequential(nn.Linear(channels * pooled**2, dense), nn.ReLU(), nn.Dropout(dropout)),
        dense2=nn.Sequential(nn.Linear(dense, dense), nn.ReLU(), nn.Dropout(dropout)),
        output=nn.Linear(dense, classes),
    )
    he_normal(convolutions(net), "fan_out")
    normal(dense_layers(net), std=0.01)
    return net


def _stage(channels: int, filters: int, count: int, norm: str | None) -> nn.Sequential:
    widths = [channels] + [filters] * count
    units = (unit(n, f, norm=norm) for n, f in itertools.pairwise(widths))
    return nn.Sequential(*units, nn.MaxPool2d(2))
