"""ViT-B/16: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, table 1.

| stage | output of 224×224 | layers |
| --- | --- | --- |
| tokens | 197×768 | 16×16 stride 16, one token for the class, learnt positions |
| blocks | 197×768 | 12 × [attention of 12 heads, perceptron with 3072 hidden units] |
| head | 1000 | layer norm, the class's token, dense |

Dropout belongs to the paper's training recipe, not to the network.
"""

from __future__ import annotations

import torch
from torch import nn

from convmesh.models.blocks import stages
from convmesh.models.initialise import truncated_normal, weighted_layers
from convmesh.models.transformer import TransformerBlock

EPSILON = 1e-6


class ImageTokens(nn.Module):
    """A token for each patch of an image, after one for its class."""

    def __init__(self, channels: int, extent: int, patch: int, features: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, features, patch, stride=patch)
        self.label = nn.Parameter(torch.zeros(1, 1, features))
        self.positions = nn.Parameter(torch.zeros(1, (extent // patch) ** 2 + 1, features))
        if not self.positions.is_meta:
            nn.init.normal_(self.positions, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.label.expand(x.shape[0], -1, -1), tokens], 1) + self.positions


class FirstToken(nn.Module):
    """The token of the class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


def vit(
    channels: int = 3,
    classes: int = 1000,
    extent: int = 224,
    patch: int = 16,
    features: int = 768,
    heads: int = 12,
    blocks: int = 12,
) -> nn.Sequential:
    """Images of 224×224 in patches of 16×16."""
    body = nn.Sequential(*(TransformerBlock(features, heads, epsilon=EPSILON) for _ in range(blocks)))
    head = nn.Sequential(nn.LayerNorm(features, eps=EPSILON), FirstToken(), nn.Linear(features, classes))
    net = stages(tokens=ImageTokens(channels, extent, patch, features), blocks=body, head=head)
    truncated_normal(weighted_layers(net), std=0.02)
    return net
