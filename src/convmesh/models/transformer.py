"""Blocks of Transformers: attention and a perceptron, each after a layer norm and added to its input.

Vaswani et al., "Attention Is All You Need", 2017, with the norms first, as in GPT-2 and ViT. Queries, keys and values
come from one dense layer: three blocks of its features, each of them heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDER = 4
"""How many times as wide as a token the perceptron's middle is."""


class Attention(nn.Module):
    """Every token attends to all, or to itself and those before it."""

    def __init__(self, features: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(features, 3 * features)
        self.proj = nn.Linear(features, features)
        self.heads, self.is_causal = heads, is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        y: torch.Tensor = self.proj(seen.transpose(1, 2).flatten(2))
        return y


class TransformerBlock(nn.Module):
    """Tokens attend to each other, then each is transformed alone."""

    def __init__(self, features: int, heads: int, is_causal: bool = False, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features, eps=epsilon)
        self.attention = Attention(features, heads, is_causal)
        self.norm2 = nn.LayerNorm(features, eps=epsilon)
        self.fc1 = nn.Linear(features, WIDER * features)
        self.fc2 = nn.Linear(WIDER * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return y
