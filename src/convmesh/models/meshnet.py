"""The mesh-tangling network: Dryden, Maruyama, Benson, Moon, Snir and Van Essen, "Improving strong-scaling of CNN
training by exploiting finer-grained parallelism", 2019.

Fully convolutional, for 18 fields of a hydrodynamics mesh on 1024×1024 (1K) or 2048×2048 (2K) points. Six blocks of
three (1K) or five (2K) convolutions with batch norm and ReLU; the first of each block has stride 2; a final convolution
predicts a class for each region of 64×64 points.

| layer | input of 2K | filters |
| --- | --- | --- |
| conv1_1 | 18×2048×2048 | 128 of 5×5, stride 2 |
| conv6_1 | 384×64×64 | 128 of 3×3, stride 2 |

The paper gives these two layers. It does not give the filters of blocks 2 to 4; here they grow evenly in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from convmesh.models.blocks import stages, unit
from convmesh.models.initialise import convolutions, he_normal

FILTERS = (128, 192, 256, 320, 384, 128)


def meshnet(
    channels: int = 18, classes: int = 2, convolutions_per_block: int = 3, filters: Sequence[int] = FILTERS
) -> nn.Sequential:
    """Three convolutions per block make the 1K network, five the 2K network."""
    parts: dict[str, nn.Module] = {}
    for index, wide in enumerate(filters, 1):
        kernel = 5 if index == 1 else 3
        first = unit(channels, wide, kernel, stride=2)
        parts[f"block{index}"] = nn.Sequential(first, *(unit(wide, wide) for _ in range(convolutions_per_block - 1)))
        channels = wide
    net = stages(**parts, predict=nn.Conv2d(channels, classes, 1))
    he_normal(convolutions(net))
    return net


def meshnet_2k(channels: int = 18, classes: int = 2, filters: Sequence[int] = FILTERS) -> nn.Sequential:
    return meshnet(channels, classes, 5, filters)
