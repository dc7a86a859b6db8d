"""Small networks to verify, and plans for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh.plans import strategy_for

needs_fork = pytest.mark.skipif(torch.cuda.is_available(), reason="what tests change travels by fork only")


class Chain(nn.Module):
    """Two convolutions with a pool between: one operator of each kind, so that a broken one is identifiable."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.AvgPool2d(2)
        self.second = nn.Conv2d(4, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.second(self.pool(self.first(x)).relu()))
        return y


class TwoHeads(nn.Module):
    """Two inputs, outputs in a dictionary, a weight used twice, dropout, a residual, a dense layer behind a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(0.4)
        self.dense = nn.Linear(4, 3)

    def forward(self, image: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.relu(self.enter(image), inplace=True)
        x = x + self.again(self.drop(F.relu(self.again(x))))
        return {"map": x * mask, "scores": self.dense(x.mean((2, 3)))}


class Counting(nn.Module):
    """Its result depends on how often it ran, which capture cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.conv(x)
        return y * self.calls


class Strange(nn.Module):
    """Two operators without a split version."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.digamma(self.conv(x))
        y: torch.Tensor = self.last(torch.lgamma(x))
        return y


def plan_for(model: nn.Module, shape: Any, **axes: int) -> cm.Plan:
    mesh = cm.Mesh(**axes)
    return cm.plan(model, shape, mesh, strategy_for(mesh))
