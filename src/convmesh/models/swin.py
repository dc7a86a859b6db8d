"""Swin-T: Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", 2021, table 7.

| stage | output of 224×224 | layers |
| --- | --- | --- |
| patches | 56×56×96 | 4×4 stride 4, layer norm |
| stage1 | 56×56×96 | 2 × [attention in windows of 7×7, 3 heads, perceptron with 384 hidden units] |
| stage2 | 28×28×192 | 2×2 neighbours merged, 2 × [6 heads, 768] |
| stage3 | 14×14×384 | merged, 6 × [12 heads, 1536] |
| stage4 | 7×7×768 | merged, 2 × [24 heads, 3072] |
| head | 1000 | layer norm, mean, dense |

Every second block shifts its windows by half of one, unless one covers all. Tokens and windows keep height and width as
separate dims: ranks that have some rows have whole windows of them. Stochastic depth belongs to the paper's training
recipe, not to the network.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from convmesh.models.blocks import stages
from convmesh.models.initialise import truncated_normal, weighted_layers
from convmesh.models.transformer import WIDER

DEVIATION = 0.02
FAR = -100.0
"""Added to the scores of tokens that are not neighbours: a shift brings opposite borders together."""


class WindowAttention(nn.Module):
    """Tokens attend to those in their window; scores have a learnt bias for each displacement."""

    def __init__(self, features: int, heads: int, extent: int, window: int, shift: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(features, 3 * features)
        self.proj = nn.Linear(features, features)
        self.heads, self.extent, self.window, self.shift = heads, extent, window, shift
        self.biases = Biases(heads, extent, window, shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        seen: torch.Tensor = self.proj(self._joined(self._attention(self.qkv(self._windows(x)))))
        return torch.roll(seen, (self.shift, self.shift), (1, 2)) if self.shift else seen

    def _windows(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, rows of windows, columns of windows, tokens of one, features)."""
        count = self.extent // self.window
        rows: torch.Tensor = x.unflatten(2, (count, self.window)).unflatten(1, (count, self.window))
        return rows.transpose(2, 3).flatten(3, 4)

    def _attention(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(4, 0, 1, 2, 5, 3, 6).unbind(0)
        seen: torch.Tensor = F.scaled_dot_product_attention(q, k, v, self.biases())
        return seen.transpose(3, 4).flatten(4)

    def _joined(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = x.unflatten(3, (self.window, self.window)).transpose(2, 3)
        return rows.flatten(3, 4).flatten(1, 2)


class Biases(nn.Module):
    """What is added to scores: for the displacement of two tokens, and for strangers that a shift brought together."""

    places: torch.Tensor
    strangers: torch.Tensor

    def __init__(self, heads: int, extent: int, window: int, shift: int) -> None:
        super().__init__()
        self.extent, self.window, self.shift = extent, window, shift
        count, tokens = extent // window if shift else 1, window * window
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.register_buffer("places", torch.zeros(tokens, tokens, dtype=torch.int64), persistent=False)
        self.register_buffer("strangers", torch.zeros(count, count, 1, tokens, tokens), persistent=False)
        if not self.table.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the table, and fill in what follows from the sizes."""
        nn.init.trunc_normal_(self.table, std=DEVIATION, a=-2 * DEVIATION, b=2 * DEVIATION)
        along = torch.arange(self.window)
        rows, columns = (axis.flatten() for axis in torch.meshgrid(along, along, indexing="ij"))
        down, right = (axis[:, None] - axis[None, :] + self.window - 1 for axis in (rows, columns))
        self.places.copy_(down * (2 * self.window - 1) + right)
        if self.shift:
            self.strangers.copy_(self._apart())

    def _apart(self) -> torch.Tensor:
        """By window: `FAR` for tokens that were on different sides of a border before the shift."""
        behind = (torch.arange(self.extent) >= self.extent - self.shift).int()
        sides = behind.view(-1, 1, self.window, 1) * 2 + behind.view(1, -1, 1, self.window)
        flat = sides.flatten(2)
        return FAR * (flat.unsqueeze(2) != flat.unsqueeze(3)).unsqueeze(2)

    def forward(self) -> torch.Tensor:
        """(rows of windows, columns of windows, heads, tokens, tokens), or the last three alone."""
        biases = self.table[self.places].permute(2, 0, 1)
        return biases + self.strangers if self.shift else biases


class SwinBlock(nn.Module):
    """Tokens attend to each other in windows, then each is transformed alone."""

    def __init__(self, features: int, heads: int, extent: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.attention = WindowAttention(features, heads, extent, window, shift)
        self.norm2 = nn.LayerNorm(features)
        self.fc1 = nn.Linear(features, WIDER * features)
        self.fc2 = nn.Linear(WIDER * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return y


class Merging(nn.Module):
    """2×2 neighbours as one token of twice the features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * features)
        self.reduction = nn.Linear(4 * features, 2 * features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        y: torch.Tensor = self.reduction(self.norm(pairs.permute(0, 1, 3, 4, 2, 5).flatten(3)))
        return y


class Patches(nn.Module):
    """A token for each square of an image, in its place: (samples, height, width, features)."""

    def __init__(self, channels: int, patch: int, features: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, features, patch, stride=patch), nn.LayerNorm(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return y


class MeanToken(nn.Module):
    """The mean of all tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((1, 2))


def swin(
    channels: int = 3,
    classes: int = 1000,
    extent: int = 224,
    patch: int = 4,
    window: int = 7,
    features: int = 96,
    heads: tuple[int, ...] = (3, 6, 12, 24),
    blocks: tuple[int, ...] = (2, 2, 6, 2),
) -> nn.Sequential:
    """Images of 224×224; `heads` and `blocks` of each stage."""
    parts: dict[str, nn.Module] = {"patches": Patches(channels, patch, features)}
    rows = extent // patch
    for stage, (count, depth) in enumerate(zip(heads, blocks, strict=True)):
        merging = [] if stage == 0 else [Merging(features)]
        features, rows = (features, rows) if stage == 0 else (2 * features, rows // 2)
        side = min(window, rows)
        shifts = [0 if side == rows or block % 2 == 0 else side // 2 for block in range(depth)]
        parts[f"stage{stage + 1}"] = nn.Sequential(
            *merging, *(SwinBlock(features, count, rows, side, shift) for shift in shifts)
        )
    parts["head"] = nn.Sequential(nn.LayerNorm(features), MeanToken(), nn.Linear(features, classes))
    net = stages(**parts)
    truncated_normal(weighted_layers(net), std=DEVIATION)
    return net
