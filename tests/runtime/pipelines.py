"""A small network for tests of pipelines, split and whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh

HEIGHT = {"*": {"height": "height"}}
FILTERS = {"*": {"channel": "filter"}}


class Small(nn.Module):
    """Residuals, in-place work, a skip over most of it; no batch norm, so that micro-batches change nothing."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, 4, 3, padding=1)
        self.body = nn.Sequential(
            nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
            nn.Dropout(dropout),
        )  # fmt: skip
        self.deep = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.enter(x)
        z = F.interpolate(self.deep(self.body(y + 0.5) + y), size=x.shape[2:])
        return self.head(torch.cat([z, y], 1))  # type: ignore[no-any-return]


def small(seed: int = 0, samples: int = 8, **options: Any) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    model = Small(**options).double()
    return model, torch.randn(samples, 2, 8, 8, dtype=torch.float64), torch.randint(0, 3, (samples, 8, 8))


def split(
    model: nn.Module, mesh: Mesh, loss: Any, strategy: Any = None, samples: int = 8, **options: Any
) -> cm.ParallelNet:
    strategy = strategy or ("data+pipeline" if "data" in mesh.axes else "pipeline")
    options = {"microbatches": 2, **options}
    return cm.parallelize(model, cm.plan(model, (samples, 2, 8, 8), mesh, strategy, **options), loss=loss)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def largest(results: list[float]) -> float:
    return max(results)
