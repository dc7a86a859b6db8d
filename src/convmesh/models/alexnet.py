"""AlexNet: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014 (one tower).

| stage | output of 224×224 | convolutions |
| --- | --- | --- |
| 1 | 64×27×27 | 11×11 stride 4, then max 3×3 stride 2 |
| 2 | 192×13×13 | 5×5, then max |
| 3 | 256×6×6 | 3×3 to 384, 256, 256, then max |
| dense | 4096, 4096, classes | dropout before the first two |

Weights are drawn as in Krizhevsky, Sutskever and Hinton, 2012, section 5: deviation 0.01, and biases of 1 in the layers
where they make the first ReLUs active.
"""

from __future__ import annotations

from torch import nn

from convmesh.models.blocks import scaled, stages
from convmesh.models.initialise import convolutions, dense_layers, fill_bias, normal


def alexnet(
    channels: int = 3, classes: int = 1000, width: float = 1.0, pooled: int = 6, dropout: float = 0.5
) -> nn.Sequential:
    """Images of 224×224; `width` scales all filters."""
    f1, f2, f3, f4, dense = (scaled(n, width) for n in (64, 192, 384, 256, 4096))
    net = stages(
        stage1=nn.Sequential(nn.Conv2d(channels, f1, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        stage2=nn.Sequential(nn.Conv2d(f1, f2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        stage3=nn.Sequential(
            *(nn.Conv2d(f2, f3, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(f3, f4, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(f4, f4, 3, padding=1), nn.ReLU()),
            nn.MaxPool2d(3, 2),
        ),
        pool=nn.Sequential(nn.AdaptiveAvgPool2d(pooled), nn.Flatten()),
        dense1=nn.Sequential(nn.Dropout(dropout), nn.Linear(f4 * pooled**2, dense), nn.ReLU()),
        dense2=nn.Sequential(nn.Dropout(dropout), nn.Linear(dense, dense), nn.ReLU()),
        output=nn.Linear(dense, classes),
    )
    _initialise(net)
    return net


def _initialise(net: nn.Module) -> None:
    normal(convolutions(net), std=0.01)
    normal(dense_layers(net), std=0.01)
    _, conv2, _, conv4, conv5 = convolutions(net)
    dense1, dense2, _ = dense_layers(net)
    for layer in (conv2, conv4, conv5, dense1, dense2):
        fill_bias(layer, 1.0)
