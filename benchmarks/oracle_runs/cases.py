"""What is run: four networks on small inputs, eight strategies, one to sixteen ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import convmesh as cm
from convmesh import models
from convmesh.errors import ConvMeshError
from convmesh.layout.mesh import space_axes
from convmesh.plans.presets import AXES_OF

SIZES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "resnet50": ({"classes": 100}, (8, 3, 64, 64)),
    "vgg16": ({"classes": 100, "pooled": 2, "dropout": 0.0}, (8, 3, 64, 64)),
    "cosmoflow": ({"extent": 32, "dropout": 0.0}, (8, 4, 32, 32, 32)),
    "unet3d": ({"filters": 8, "most_filters": 80, "levels": 4}, (8, 1, 32, 32, 32)),
}
"""By network: what differs from the published one, and the global batch."""

STRATEGIES = ("data", "filter", "channel", "data+filter", "data+spatial", "pipeline", "spatial", "hybrid")


@dataclass(frozen=True)
class Case:
    """One network under one strategy on one mesh."""

    network: str
    strategy: str
    mesh: cm.Mesh

    @property
    def name(self) -> str:
        return f"{self.network}, {self.strategy}, {self.mesh.size}"

    @property
    def shape(self) -> tuple[int, ...]:
        return SIZES[self.network][1]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return models.create(self.network, **SIZES[self.network][0])

    def plan(self, model: nn.Module | None = None) -> cm.Plan:
        options = {"microbatches": 4} if self.strategy == "pipeline" else {}
        return cm.plan(model or self.model(), self.shape, self.mesh, self.strategy, **options)  # type: ignore[arg-type]

    @property
    def loss(self) -> Callable[..., Any]:
        return models.find(self.network).task.loss()

    def target(self) -> torch.Tensor:
        classes = SIZES[self.network][0].get("classes", 3)
        if self.network == "cosmoflow":
            return torch.rand(self.shape[0], 4)
        return torch.randint(0, classes, (self.shape[0], *(self.shape[2:] if self.network == "unet3d" else ())))


def cases(networks: Sequence[str], ranks: Sequence[int]) -> Iterator[Case]:
    """All that fit; what does not is left out, since there is nothing to measure."""
    for network in networks:
        model = Case(network, "data", cm.Mesh(data=1)).model()
        for count in ranks:
            for strategy in STRATEGIES if count > 1 else ("data",):
                case = Case(network, strategy, mesh_of(strategy, count, len(SIZES[network][1]) - 2))
                if _differs(case):
                    try:
                        case.plan(model)
                    except ConvMeshError:
                        continue
                    yield case


def _differs(case: Case) -> bool:
    """From the others: two parts need ranks for both, and dense layers that go their own way must exist."""
    return ("+" not in case.strategy or case.mesh.size > 2) and (case.strategy, case.network) != ("hybrid", "unet3d")


def mesh_of(strategy: str, ranks: int, spatial_dims: int) -> cm.Mesh:
    """Two parts share the ranks: two samples at a time, the rest within each; space is cut along up to two dims."""
    if "+" in strategy:
        inner = mesh_of(strategy.split("+")[1], ranks // 2, spatial_dims)
        return cm.Mesh(data=2, **inner.axes)
    if strategy == "spatial":
        names = space_axes(spatial_dims)[:2]
        first = 2 if ranks >= 4 else ranks
        return cm.Mesh(**{names[0]: ranks // first, names[1]: first} if ranks >= 4 else {names[0]: ranks})
    return cm.Mesh(**{AXES_OF[strategy][0]: ranks})
