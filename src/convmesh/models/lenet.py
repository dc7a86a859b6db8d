"""LeNet-5: LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition", 1998, fig. 2.

| stage | output | data | parameters |
| --- | --- | --- | --- |
| conv1: 5×5, tanh, mean of 2×2 | 6×14×14 | 1176 | 156 |
| conv2: 5×5, tanh, mean of 2×2 | 16×5×5 | 400 | 2416 |
| conv3: 5×5, tanh | 120×1×1 | 120 | 48120 |
| dense, tanh | 84 | 84 | 10164 |
| output | 10 | 10 | 850 |

In total 1790 values per sample and 61706 parameters. Every map of `conv2` sees every map of `conv1`, pooling has no
weights and the output is dense instead of Gaussian, as in every LeNet-5 since.
"""

from __future__ import annotations

import math

from torch import nn

from convmesh.models.blocks import stages
from convmesh.models.initialise import fill_bias, weighted_layers


def lenet5(channels: int = 1, classes: int = 10) -> nn.Sequential:
    """Digits of 32×32 pixels."""
    net = stages(
        conv1=nn.Sequential(nn.Conv2d(channels, 6, 5), nn.Tanh(), nn.AvgPool2d(2)),
        conv2=nn.Sequential(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        conv3=nn.Sequential(nn.Conv2d(16, 120, 5), nn.Tanh()),
        dense=nn.Sequential(nn.Flatten(), nn.Linear(120, 84), nn.Tanh()),
        output=nn.Linear(84, classes),
    )
    _initialise(net)
    return net


def _initialise(net: nn.Module) -> None:
    """Uniform within ±2.4 / fan in (appendix A of the paper)."""
    for layer in weighted_layers(net):
        bound = 2.4 / math.prod(layer.weight.shape[1:])
        nn.init.uniform_(layer.weight, -bound, bound)
        fill_bias(layer)
