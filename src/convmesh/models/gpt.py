"""GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, the smallest of table 2.

| stage | output of 1024 words | layers |
| --- | --- | --- |
| words | 1024×768 | a table of 50257 words, learnt positions |
| blocks | 1024×768 | 12 × [causal attention of 12 heads, perceptron with 3072 hidden units] |
| head | 50257×1024 | layer norm, scores of all words from the first stage's table |

The activation is the exact GELU. Dropout belongs to the training recipe, not to the network.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from convmesh.models.blocks import stages
from convmesh.models.initialise import dense_layers, normal
from convmesh.models.transformer import TransformerBlock

DEVIATION = 0.02


class Words(nn.Module):
    """A vector for each word and one for its place. Words are whole numbers; a plan may bring them as floats."""

    def __init__(self, vocabulary: int, length: int, features: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, features)
        self.positions = nn.Parameter(torch.zeros(length, features))
        if not self.positions.is_meta:
            nn.init.normal_(self.table.weight, std=DEVIATION)
            nn.init.normal_(self.positions, std=DEVIATION)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.table(words.abs().long()) + self.positions[: words.shape[1]]
        return y


class ClassesFirst(nn.Module):
    """Scores in dim 1, where losses want them."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.transpose(1, 2)


def gpt(
    vocabulary: int = 50257,
    length: int = 1024,
    features: int = 768,
    heads: int = 12,
    blocks: int = 12,
    tied: bool = True,
) -> nn.Sequential:
    """Up to `length` words in, scores of the word after each out; `tied`: the head uses the table of words."""
    words = Words(vocabulary, length, features)
    body = [TransformerBlock(features, heads, is_causal=True) for _ in range(blocks)]
    scores = nn.Linear(features, vocabulary, bias=False)
    head = nn.Sequential(nn.LayerNorm(features), scores, ClassesFirst())
    net = stages(words=words, blocks=nn.Sequential(*body), head=head)
    normal(dense_layers(net), std=DEVIATION)
    for block in body:  # what blocks add must not grow with their number
        normal(iter([block.attention.proj, block.fc2]), std=DEVIATION / math.sqrt(2 * blocks))
    if tied:
        scores.weight = words.table.weight
    return net
